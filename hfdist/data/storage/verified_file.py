"""A file on this machine, and the certainty that it is still the one that was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.localfile import LocalFile


@contextmanager
def whole_file(file: DataFile) -> Iterator[Path]:
    """Give the whole file, fetched where it is not yet here.

    Raises:
        DataError: it cannot be fetched, or has changed since it was found, even while it was read.
    """
    with file.local() as path:
        # Before, too: a mapped file that has become shorter ends the process.
        check_here(file)
        try:
            yield path
        finally:
            check_here(file)


def check_here(file: DataFile) -> None:
    """Make sure that a file of this machine has not changed.

    Others are not asked for: their fetched copy is of the version that was found, and stays.

    Raises:
        DataError: it has, or is gone.
    """
    if isinstance(file, LocalFile):
        file.check_unchanged()
