"""Arrays that this machine keeps: numpy's files with a hash behind, so that a damaged one is never given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from hfdist.data.cache.files import write_atomically

_HASH_BYTES = 16
# Larger ones are mapped: a corpus may have more files than a process may have mappings.
_LARGEST_LOADED_BYTES = 1 << 20
_PIECE_BYTES = 1 << 22


def load_array(path: Path) -> NDArray[Any] | None:
    """Give what `save_array` wrote; None: it is not there, or not as it was written."""
    try:
        size_bytes = path.stat().st_size - _HASH_BYTES
        with path.open("rb") as file:
            hashed = xxhash.xxh3_128()
            for start in range(0, size_bytes, _PIECE_BYTES):
                hashed.update(file.read(min(_PIECE_BYTES, size_bytes - start)))
            if file.read() != hashed.digest():
                return None
        array: NDArray[Any] = np.load(
            path, mmap_mode="r" if size_bytes > _LARGEST_LOADED_BYTES else None, allow_pickle=False
        )
    except (OSError, ValueError, EOFError):
        return None
    return array


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array; its folder must be there. numpy's own reader takes the file, too, and passes over the hash."""

    def write(out: BinaryIO) -> None:
        hashing = _Hashing(out)
        np.lib.format.write_array(hashing, array, allow_pickle=False)
        out.write(hashing.hashed.digest())

    write_atomically(path, write)


class _Hashing:
    """A file that hashes what is written into it. Not a real one to numpy, which would write past it."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self.hashed = out, xxhash.xxh3_128()

    def write(self, content: bytes) -> int:
        self.hashed.update(content)
        return self._out.write(content)
