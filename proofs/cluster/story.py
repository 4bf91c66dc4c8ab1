"""What happened to a run that was disturbed, start by start, and how far it is from the run that nobody disturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hfdist.records import RunFolder, read_lines
from tests.cluster.runs import Difference

MOST_LOSSES, MOST_WEIGHTS = 1e-5, 1e-4
"""Of a `Difference`: float32 sums in another order, over some tens or hundreds of steps."""


class Story(NamedTuple):
    """One proof."""

    title: str
    what: str
    """One or two sentences: what was done."""
    starts: Sequence[Mapping[str, Any]]
    """What events.jsonl says of each."""
    end: str
    """Where the run or the job stands in the end."""
    difference: Difference | None = None
    """From the undisturbed run; None: it did not train."""

    def check(self, *expected: tuple[int, int]) -> None:
        """AssertionError: other starts than `expected` (processes, exit code), from step 0 again, or too far off."""
        found = [(one.get("processes"), one.get("exit_code")) for one in self.starts]
        assert found == list(expected), self
        assert all(one["from_step"] > 0 for one in self.starts[1:]), self
        if self.difference is not None:
            assert self.difference.losses < MOST_LOSSES, self
            assert self.difference.weights < MOST_WEIGHTS, self

    def lines(self) -> list[str]:
        """As Markdown."""
        lines = [f"### {self.title}", "", self.what, ""]
        if self.starts:
            lines += ["| start | processes | from step | to step | exit code | events |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {one['start']} | {one['processes']} | {one['from_step']} | {one.get('step', '?')} "
                f"| {one.get('exit_code', '?')} | {', '.join(one['events'])} |"
                for one in self.starts
            ]
            lines.append("")
        lines.append(self.end)
        if self.difference is not None:
            lines[-1] += (
                f" From the undisturbed run of one process, losses differ by {self.difference.losses:.1e} of themselves"
                f" at most (allowed: {MOST_LOSSES:g}), and weights by {self.difference.weights:.1e} of the largest of "
                f"their parameter (allowed: {MOST_WEIGHTS:g})."
            )
        return [*lines, ""]


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """What events.jsonl says of each start: its processes, the step from which it went on, all events, and its end."""
    found: dict[int, dict[str, Any]] = {}
    for event in read_lines(RunFolder(run_dir).events):
        one = found.setdefault(event["start"], {"start": event["start"], "from_step": 0, "events": []})
        name = event["event"]
        if name not in one["events"]:
            one["events"].append(name)
        if name == "start":
            one["processes"] = event["layout"]["replicate"] * event["layout"]["shard"]
        elif name == "resume":
            one["from_step"] = event["step"]
        elif name == "end":
            one |= {key: event[key] for key in ("step", "state", "exit_code")}
    return list(found.values())
