"""Lines of a file to which another process adds: each reading takes new lines only, or all if the file was replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISREG

from hfdist.records.lines import parse_line

_LONGEST = 1 << 24
"""Most bytes of a line; hfdist writes no longer ones."""
_KNOWN = 64
"""Bytes before the place that was reached. In a file that was replaced they differ."""


class Follower:
    """Reads a file of one JSON object a line.

    Lines that cannot be read are left out. One without its end is read once it has it: it may still be written.

    Args:
        path: the file, which need not exist.
        begin: called when the file was replaced: earlier lines do not count any more.
        take: called with each line.
    """

    def __init__(self, path: Path, begin: Callable[[], None], take: Callable[[Mapping[str, object]], None]) -> None:
        self._path, self._begin, self._take = path, begin, take
        self._stamp: tuple[int, ...] = ()
        self._offset = 0
        self._known = b""

    def read(self) -> bool:
        """Read new lines; whether there was anything new."""
        try:
            stat = self._path.stat()
            if not S_ISREG(stat.st_mode):
                # A pipe or a device in its place would not end.
                return False
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if stamp == self._stamp:
                return False
            with self._path.open("rb") as file:
                file.seek(max(self._offset - _KNOWN, 0))
                if stat.st_size < self._offset or file.read(len(self._known)) != self._known:
                    # Steps that are done again: their lines have moved to another file.
                    self._begin()
                    self._offset = 0
                    file.seek(0)
                while (line := file.readline(_LONGEST)).endswith(b"\n") or len(line) == _LONGEST:
                    self._offset += len(line)
                    if (content := parse_line(line)) is not None:
                        self._take(content)
                file.seek(max(self._offset - _KNOWN, 0))
                self._known = file.read(min(self._offset, _KNOWN))
        except OSError:
            # Not there yet, or a shared disk that does not answer: the next reading sees it.
            return False
        self._stamp = stamp
        return True
