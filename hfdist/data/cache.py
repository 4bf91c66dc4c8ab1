"""Files that are computed once and kept on this machine for all ranks and runs, under names that are hashes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.atomic_write import write_atomically

S = TypeVar("S", bound=np.generic)

_HASH_BYTES = 16
"""Bytes of the hash at the end of a cached array."""
_LARGEST_LOADED_BYTES = 1 << 20
"""Bytes of the largest array that is not mapped: a corpus may have more files than a process may have mappings."""
_READ_BYTES = 1 << 22
"""Bytes that are hashed at a time."""
_HEADER_LOCK = threading.Lock()
"""Held while numpy parses a header as Python: two threads may raise SystemError before 3.13 (cpython#106905)."""


def digest_of(values: Sequence[object]) -> str:
    """Hash values that JSON can hold, to 24 hexadecimal digits, for names in caches and for identities."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def digest_of_pieces(pieces: Iterable[str]) -> str:
    """Hash a JSON text that is too long to be made at once; `digest_of` gives the same for its values."""
    hashed = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        hashed.update(piece.encode())
    return hashed.hexdigest()


def write_once(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Make a file that is not there: one process of this machine calls `write` with it open, and the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            write_atomically(path, write)


def cached_array(path: Path, make: Callable[[], NDArray[S]], *, keep: bool = True) -> NDArray[S]:
    """Load an array, or make it in one process of this machine, and save it with `keep`; a damaged one is made anew."""
    found = _load(path)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        # Another process may have made it meanwhile.
        found = _load(path)
        if found is not None:
            return found
        made = make()
        if not keep:
            return made
        write_atomically(path, _HashedArray(made).write_to)
        # A large array is mapped, as other processes have it, so that it is in the machine's memory once.
        return load_array(path) if made.nbytes > _LARGEST_LOADED_BYTES else made


def load_array(path: Path, *, is_mapped: bool = True) -> NDArray[Any]:
    """Load or map a .npy file, in any thread. OSError, ValueError or EOFError: it cannot be read."""
    with _HEADER_LOCK:
        return np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)


def _load(path: Path) -> NDArray[Any] | None:
    """Load a cached array whose hash is right; None: it is not there, or damaged."""
    try:
        size_bytes = path.stat().st_size - _HASH_BYTES
        with path.open("rb") as file:
            hashed = xxhash.xxh3_128()
            for start in range(0, size_bytes, _READ_BYTES):
                hashed.update(file.read(min(_READ_BYTES, size_bytes - start)))
            if file.read() != hashed.digest():
                return None
        return load_array(path, is_mapped=size_bytes > _LARGEST_LOADED_BYTES)
    except (OSError, ValueError, EOFError):
        return None


class _HashedArray:
    """An array that writes itself in numpy's format with a hash after it; numpy's reader stops before the hash.

    numpy writes to this object, and not to the file: into a real file it would write past `write`, which hashes.
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array
        self._hashed = xxhash.xxh3_128()

    def write_to(self, out: BinaryIO) -> None:
        """Write the array and its hash."""
        self._out = out
        np.lib.format.write_array(self, self._array, allow_pickle=False)
        out.write(self._hashed.digest())

    def write(self, content: bytes) -> int:
        """Write bytes that numpy gives, and hash them."""
        self._hashed.update(content)
        return self._out.write(content)
