"""A file to which another process adds lines: each reading takes the new ones, or all if the file was replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from hfdist.records.lines import parse_line

_LONGEST = 1 << 24
"""Most bytes of a line; hfdist writes no longer ones."""
_NUM_KNOWN = 64
"""Number of bytes, before the place that was reached, by which a replaced file is told: they differ there."""


class Follower:
    """A reader of a growing file with one JSON object a line.

    A line that is no JSON object is left out. A line without its end waits for a later reading: it is being written.

        bytes of the file   [lines that were taken ......| _known][new lines][a line without its end
                                                                  ^ _offset

    Args:
        path: the file, which need not exist.
        begin: called when the file was replaced: earlier lines do not count any more.
        take: called with the object of each line.
    """

    def __init__(self, path: Path, begin: Callable[[], None], take: Callable[[Mapping[str, object]], None]) -> None:
        self._path, self._begin, self._take = path, begin, take
        self._stamp: tuple[int, ...] = ()
        self._offset = 0
        self._known = b""

    def read(self) -> bool:
        """Take the new lines; give whether the file has changed since the last reading."""
        try:
            stat = self._path.stat()
            if not S_ISREG(stat.st_mode):
                # A pipe or a device in the file's place would not end.
                return False
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if stamp == self._stamp:
                return False
            with self._path.open("rb") as file:
                if stat.st_size < self._offset or self._differs_before_offset(file):
                    # The run does some steps again: their lines have moved to another file.
                    self._begin()
                    self._offset = 0
                self._take_lines(file)
        except OSError:
            # Not there yet, or a shared disk that does not answer: the next reading sees it.
            return False
        self._stamp = stamp
        return True

    def _differs_before_offset(self, file: BinaryIO) -> bool:
        file.seek(max(self._offset - _NUM_KNOWN, 0))
        return file.read(len(self._known)) != self._known

    def _take_lines(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        while True:
            line = file.readline(_LONGEST)
            # A longer line is not one of hfdist: it is passed over piece by piece, as no piece is a JSON object.
            is_piece = len(line) == _LONGEST
            if not line.endswith(b"\n") and not is_piece:
                break
            self._offset += len(line)
            content = parse_line(line)
            if content is not None:
                self._take(content)
        file.seek(max(self._offset - _NUM_KNOWN, 0))
        self._known = file.read(min(self._offset, _NUM_KNOWN))
