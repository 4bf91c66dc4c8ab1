"""Files with one JSON object a line, each of a step: a run that goes back moves those that it will write again."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from hfdist.errors import ResourceError


class StepLines:
    """Writes such a file, floats at full precision; a value that is not finite as null, since JSON has no NaN.

    Raises:
        ResourceError: from `open` and `write`: a line that the disk does not take.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def open(self, step: int) -> None:
        """Go on behind the lines up to `step`, at step 0 behind none; others are set aside."""
        if self._file is not None:
            self._file.close()
        set_aside(self._path, step if step > 0 else -1)
        with _told(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, once the file is open."""
        if self._file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with _told(self._path):
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()


def earlier(path: Path) -> Path:
    """Where lines are that were set aside: `metrics.earlier.jsonl` beside `metrics.jsonl`."""
    return path.with_suffix(f".earlier{path.suffix}")


def set_aside(path: Path, step: int = -1) -> None:
    """Move the lines of later steps than `step` to the end of `earlier(path)`, and with them what is no such line.

    Raises:
        ResourceError: the disk does not take them; they are where they were.
    """
    kept: list[str] = []
    moved: list[str] = []
    for line in _lines_of(path):
        (kept if 0 <= _step_of(line) <= step else moved).append(line)
    if moved:
        _replace(earlier(path), [*_lines_of(earlier(path)), *moved])
        _replace(path, kept)


def _replace(path: Path, lines: list[str]) -> None:
    # Beside the old file first: a run that is killed in between must find the lines again.
    unfinished = path.with_suffix(".tmp")
    with _told(path):
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(line.rstrip("\n") + "\n" for line in lines)
            # Its name must not reach the disk before its lines: a machine that stops would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read such a file; none: an empty list. A line cut off by a kill is left out."""
    return [content for line in _lines_of(path) if (content := _parse(line)) is not None]


def _lines_of(path: Path) -> list[str]:
    """As they are, with their ends."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []


def _parse(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _step_of(line: str) -> float:
    """Its step; -1: it is no whole line of a step."""
    content = _parse(line) if line.endswith("\n") else None
    step = None if content is None else content.get("step")
    return step if isinstance(step, (int, float)) else -1


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A disk that takes no line takes no checkpoint either; the last one is whole.
        raise ResourceError(
            "a line cannot be written",
            where=str(path),
            found=f"{error.strerror}; {shutil.disk_usage(path.parent).free:,} bytes free",
            hint="free space, or another disk for run.dir",
        ) from error
