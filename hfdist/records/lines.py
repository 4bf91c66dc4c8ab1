"""Files of one JSON object a line: one that a kill cut off is left out, and lines of later steps can be set aside."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.errors import ResourceError

Line = dict[str, Any]
"""The object of a line; nobody has checked what it holds."""


def read_lines(path: Path) -> list[Line]:
    """Read the objects of a file; []: there is no file. A line cut off by a kill is left out."""
    return [content for _, content in read_numbered(path)]


def read_numbered(path: Path) -> Iterator[tuple[int, Line]]:
    """Read the objects of a file with the numbers of their lines, from 1."""
    for number, line in enumerate(_lines_of(path), 1):
        content = parse_line(line)
        if content is not None:
            yield number, content


def add_line(file: TextIO, content: Mapping[str, object]) -> None:
    """Add a line, in one write: floats at full precision, also of numpy and torch; null if they are not finite."""
    file.write(_to_line(content))
    file.flush()


def append_line(path: Path, content: Mapping[str, object]) -> None:
    """Add a line to a file that is not open, after one that a kill or a full disk may have cut off."""
    with reporting_full_disk(path), path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(_to_line(content).encode())


def write_lines(path: Path, contents: Iterable[Mapping[str, object]]) -> None:
    """Replace a file by one with these lines."""
    _replace(path, map(_to_line, contents))


def _to_line(content: Mapping[str, object]) -> str:
    return json.dumps(_plain(content), allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """Write a value as JSON has it, at any depth."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # A number or an array of numpy or torch, of which nothing is imported here.
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else _plain(to_list())


def earlier(path: Path) -> Path:
    """Where lines are that were set aside: `metrics.earlier.jsonl` beside `metrics.jsonl`."""
    return path.with_suffix(f".earlier{path.suffix}")


def set_aside(path: Path, step: int = -1) -> None:
    """Move the lines of later steps than `step` to the end of `earlier(path)`, and with them what is no such line.

    If the disk does not take them, they are where they were.
    """
    kept: list[str] = []
    moved: list[str] = []
    for line in _lines_of(path):
        content = parse_line(line) if line.endswith("\n") else None
        number = -1 if content is None else content.get("step")
        (kept if isinstance(number, (int, float)) and 0 <= number <= step else moved).append(line)
    if moved:
        # First where they go: a run that is killed in between must find the lines again.
        _replace(earlier(path), [*_lines_of(earlier(path)), *moved])
        _replace(path, kept)


def _replace(path: Path, lines: Iterable[str]) -> None:
    with reporting_full_disk(path):
        remove_unfinished(path)
        write_atomically(path, "".join(line.rstrip("\n") + "\n" for line in lines).encode())


def _lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []


def parse_line(line: str | bytes) -> Line | None:
    """Give the object of a line; None: the line is no JSON object."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def reporting_full_disk(path: Path) -> Iterator[None]:
    """Turn an OSError into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        # A disk that takes no line takes no checkpoint either; the last one is whole.
        found = f"{error.strerror}"
        with suppress(OSError):
            found += f"; {shutil.disk_usage(path.parent).free:,} bytes free"
        hint = "free space, or another disk for run.dir"
        raise ResourceError("a line cannot be written", where=str(path), found=found, hint=hint) from error
