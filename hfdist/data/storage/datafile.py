"""What a source may ask of a file, wherever it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray


class DataFile(Protocol):
    """A file that is read, never written. Usable in forked processes: nothing open is kept."""

    url: str
    """As it is shown to people: without user, password or signed query."""
    name: str
    """Path relative to the source."""
    size_bytes: int
    version: str
    """Changes with the content, as far as the store tells without reading: time of change, ETag, ..."""
    key: str
    """Tells address, version and all else apart that this machine knows of it; a file name."""
    contents: NDArray[np.uint64] | None
    """Hashes of its parts, once they are known: see `contents.py`."""

    def local(self) -> AbstractContextManager[Path]:
        """Give the whole file on this machine, fetched where it is not yet, and kept from eviction inside the context.

        Raises:
            DataError: it cannot be fetched, or has changed since it was found.
        """

    def open(self) -> BinaryIO:
        """Open it for seeking and reading parts, such as a footer, without fetching the whole.

        Raises:
            DataError: see `local`; later reads raise OSError.
        """

    def check_unchanged(self) -> None:
        """Compare with what was found at first.

        Raises:
            DataError: its size or version is another.
        """
