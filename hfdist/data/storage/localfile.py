"""A file on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

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
        status = self._status()
        self.size_bytes, self.version = status.st_size, str(status.st_mtime_ns)
        self.changed_ns = status.st_ctime_ns
        """When anything of it was changed last: also where the time of its content was set back."""
        known = [str(path.absolute()), self.size_bytes, self.version, self.changed_ns, status.st_ino]
        self.key = hashlib.blake2b(json.dumps(known).encode(), digest_size=20).hexdigest()
        self.contents: NDArray[np.uint64] | None = None

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
        status = self._status()
        if (status.st_size, str(status.st_mtime_ns)) != (self.size_bytes, self.version):
            raise changed(self.url)

    def _status(self) -> os.stat_result:
        try:
            return self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot be read: {error.strerror}", where=self.url)


def changed(url: str) -> DataError:
    """Give the error for a file that is not what it was."""
    return DataError(
        "has changed since the run began", where=url, hint="put the old file back, or start a new run (run.name=...)"
    )
