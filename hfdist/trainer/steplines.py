"""Files with one JSON object a line, each of a step: a run that goes back drops those that it will write again."""

from __future__ import annotations

import json
import math
import shutil
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
        """Keep the lines up to `step`; at step 0: none."""
        if self._file is not None:
            self._file.close()
        kept = [line for line in read_lines(self._path) if line["step"] <= step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the old file first: a run that is killed in between must find the lines again.
        unfinished = self._path.with_suffix(".tmp")
        self._file = unfinished.open("w", encoding="utf-8")
        for line in kept if step > 0 else []:
            self.write(line)
        unfinished.replace(self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, once the file is open."""
        if self._file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            # A disk that takes no line takes no checkpoint either; the last one is whole.
            raise ResourceError(
                "a line cannot be written",
                where=str(self._path),
                found=f"{error.strerror}; {shutil.disk_usage(self._path.parent).free:,} bytes free",
                hint="free space, or another disk for run.dir",
            ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read such a file; none: an empty list. A line cut off by a kill is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
