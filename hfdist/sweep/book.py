"""What a sweep has done, in `sweep.jsonl`: all decisions are functions of these lines, whoever was killed meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfdist.records.lines import append_line, read_lines

BOOK = "sweep.jsonl"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of a trial at the end of a rung."""

    step: int
    tokens: int
    """Read by then."""
    value: float | None
    """Of the metric; None: it was not finite, or there is none."""


@dataclass(kw_only=True)
class Trial:
    """One combination of values."""

    number: int
    values: dict[str, Any]
    parent: int | None = None
    """The trial at whose checkpoint it begins; None: at step 0."""
    results: list[Result] = field(default_factory=list)
    """One for each rung whose end it has reached."""
    failure: str | None = None
    """Why it does not go on; None: it has not failed."""

    @property
    def value(self) -> float | None:
        """The newest value of the metric."""
        return self.results[-1].value if self.results else None


class Book:
    """Reads and adds lines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / BOOK
        self.trials: list[Trial] = []
        """By number."""
        for line in read_lines(self._path):
            self._take(line)

    def begin(self, values: Mapping[str, Any], parent: int | None = None) -> Trial:
        """Add a trial."""
        of_parent = {} if parent is None else {"parent": parent}
        self._add({"trial": len(self.trials), "values": dict(values), **of_parent})
        return self.trials[-1]

    def reach(self, trial: Trial, result: Result) -> None:
        """Note that a trial has reached the end of its next rung."""
        place = {"step": result.step, "tokens": result.tokens, "value": result.value}
        self._add({"trial": trial.number, "rung": len(trial.results), **place})

    def fail(self, trial: Trial, failure: str) -> None:
        """Note that a trial does not go on."""
        self._add({"trial": trial.number, "failed": failure})

    def _add(self, line: dict[str, Any]) -> None:
        append_line(self._path, line)
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "values" in line:
            trial = Trial(number=int(line["trial"]), values=dict(line["values"]), parent=line.get("parent"))
            self.trials.append(trial)
        elif "failed" in line:
            self.trials[int(line["trial"])].failure = str(line["failed"])
        else:
            result = Result(step=int(line["step"]), tokens=int(line["tokens"]), value=line["value"])
            self.trials[int(line["trial"])].results.append(result)


def rank_trials(trials: Sequence[Trial], *, maximize: bool) -> list[Trial]:
    """Give the trials with a value, the furthest first, and of these the best first."""
    sign = -1 if maximize else 1
    with_value = [(trial, trial.value) for trial in trials if trial.value is not None]
    return [
        trial for trial, value in sorted(with_value, key=lambda pair: (-pair[0].results[-1].tokens, sign * pair[1]))
    ]
