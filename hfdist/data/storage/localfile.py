"""A file on this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from hfdist.errors import DataError


class LocalFile:
    """A `DataFile` that is read where it is.

    Args:
        path: of the file.
        name: path relative to the source.

    Raises:
        DataError: it is not there.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.url, self.name = str(path), name
        self._path = path
        self.size_bytes, self.version = self._details()

    def local(self) -> AbstractContextManager[Path]:
        """Give the path itself."""
        return nullcontext(self._path)

    def open(self) -> BinaryIO:
        """Open it for reading.

        Raises:
            DataError: it is gone, or may not be read.
        """
        try:
            return self._path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from error

    def check_unchanged(self) -> None:
        """Compare size and time of change with those found at first.

        Raises:
            DataError: they are others.
        """
        if self._details() != (self.size_bytes, self.version):
            raise changed(self.url)

    def _details(self) -> tuple[int, str]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_size, str(status.st_mtime_ns)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot be read: {error.strerror}", where=self.url)


def changed(url: str) -> DataError:
    """Give the error for a file that is not what it was."""
    return DataError(
        "has changed since the run began", where=url, hint="put the old file back, or start a new run (run.name=...)"
    )
