"""What benchmarks write down: tables, the machine they ran on, and their section of the results."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

_PLACES = ("--measures", "--folder")
RESULTS = Path(__file__).parent / "RESULTS.md"


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
    machine = (
        f"gloo, Python {platform.python_version()}, {os.cpu_count()} cores, "
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
