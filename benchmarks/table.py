"""What a benchmark writes down: its section of the results, and its rows of the one table of hfdist and its peers."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "RESULTS.md"
_PLACES = ("--measures", "--folder")
MEASURED = Path(__file__).parent / "measured"
_HEADER = ["line", "measure", "hfdist", "hfdist / peer", "hfdist / limit", "goal", "met", "on"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One row: medians of interleaved repeats of one run."""

    what: str
    """With what it was counted in: `CPU time of a step, accumulation 8`."""
    unit: str
    ours: float
    peers: Mapping[str, float | str] = field(default_factory=dict)
    """Library to its figure, or to the reason why there is none."""
    limits: Mapping[str, float | str] = field(default_factory=dict)
    """What the machine itself does: a copy, a write, a bare loop."""
    goal: str = ""
    is_met: bool | None = None
    """None: there is no goal, or it could not be measured here."""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that all benchmarks have, but for `--rounds`."""
    parser.add_argument("--quick", action="store_true", help="the smallest sizes and one round: does it run at all")
    parser.add_argument("--write", action="store_true", help=f"put the section into {RESULTS.name}")
    parser.add_argument("--measures", type=Path, help="a file for the rows of the table, as JSON")
    return parser


def read_options(name: str, doc: str | None, *, rounds: int = 1, **more: dict[str, Any]) -> argparse.Namespace:
    """Read a benchmark's command line.

    Args:
        name: of the benchmark.
        doc: its docstring, whose first line describes it.
        rounds: so many by default, and one with `--quick`.
        more: further options, with the arguments of `add_argument`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=rounds, help="timed runs of each contender, interleaved")
    for option, arguments in more.items():
        parser.add_argument(f"--{option.replace('_', '-')}", **arguments)
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def publish(options: argparse.Namespace, name: str, section: str, measures: Sequence[Measure]) -> None:
    """Show a benchmark's own section, and hand its rows on."""
    sys.stdout.write(section + "\n")
    if options.write:
        write_section(RESULTS, name, section)
    if options.measures is not None:
        options.measures.write_text(json.dumps([asdict(measure) for measure in measures]))


def publish_reason(options: argparse.Namespace, reason: str) -> None:
    """Say why this machine cannot run a benchmark, which is no failure."""
    sys.stdout.write(reason + "\n")
    if options.measures is not None:
        options.measures.write_text(json.dumps(reason))


def read_measures(path: Path) -> list[Measure] | str:
    """What `publish` or `publish_reason` has written."""
    written = json.loads(path.read_text())
    return written if isinstance(written, str) else [Measure(**values) for values in written]


def remember(name: str, measures: list[Measure] | str) -> list[Measure] | str:
    """Keep the rows of a line; where there is but a reason why not, give those of the last time, if there are any.

    So a GPU's figures stay in the table when another machine measures the rest.
    """
    kept = MEASURED / f"{name}.json"
    if isinstance(measures, str):
        return read_measures(kept) if kept.is_file() else measures
    MEASURED.mkdir(exist_ok=True)
    kept.write_text(json.dumps([asdict(measure) for measure in measures], indent=1) + "\n")
    return measures


def table(lines: Mapping[str, Sequence[Measure] | str]) -> str:
    """All lines; one that has a reason in place of measures was not run."""
    rows = []
    for line, measures in lines.items():
        if isinstance(measures, str):
            rows.append([line, f"not run: {_cell(measures)}", *["-"] * (len(_HEADER) - 2)])
        else:
            rows.extend(_row(line, measure) for measure in measures)
    return markdown(_HEADER, rows)


def _row(line: str, measure: Measure) -> list[str]:
    met = {True: "yes", False: "no", None: "-"}[measure.is_met]
    ours = f"{_number(measure.ours)} {measure.unit}".strip()
    return [
        line,
        _cell(measure.what),
        ours,
        _ratios(measure.ours, measure.peers),
        _ratios(measure.ours, measure.limits),
        _cell(measure.goal) or "-",
        met,
        measure.date,
    ]


def _ratios(ours: float, others: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {_cell(other)}" if isinstance(other, str) else _ratio(ours, name, other)
                     for name, other in others.items()) or "-"  # fmt: skip


def _ratio(ours: float, name: str, other: float) -> str:
    # Memory that was not counted, where there is no GPU.
    return f"{ours / other:.3g}x {name} ({_number(other)})" if other else f"{name} (0)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


# ---- sections of the results ----


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rounded(figure: float | str) -> str:
    """A cell of a table: a figure without decimals, or the reason why there is none."""
    return figure if isinstance(figure, str) else f"{figure:.0f}"


def last_said(text: str, num_lines: int = 1) -> str:
    """The last lines of what a process has said, in one; empty: nothing."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(said[-num_lines:])


def describe_run(module: str, *packages: str, pinned: Sequence[str] = ()) -> str:
    """What stands above each table: versions, this machine and what else it does, the day and the command.

    Args:
        module: the benchmark's.
        packages: of this environment, that took part.
        pinned: `NAME VERSION` of peers that are not in it, as `benchmarks.overlay.pinned` gives them.
    """
    versions = ", ".join([*(f"{name} {version(name)}" for name in packages), *pinned])
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    machine = (
        f"{backend}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f} at the end, this benchmark's ranks included"
    )
    return f"{versions}; {machine}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; `{_command(module)}`"


def _command(module: str) -> str:
    """How this process was started, without options that name a place on this machine."""
    given = iter(sys.argv[1:])
    kept = [word for word in given if not (word in _PLACES and next(given, None))]
    return " ".join(["python -m", module, *kept])


def write_section(path: Path, name: str, section: str) -> None:
    """Put the section between its markers in a file, in place of the one that is there."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    block = f"{begin}\n{section}\n{end}\n"
    if begin in text:
        before, rest = text.split(begin, 1)
        text = before + block + rest.split(end + "\n", 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{block}"
    path.write_text(text, encoding="utf-8")
