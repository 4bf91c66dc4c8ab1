"""What is computed once and kept on this machine, for all ranks, epochs and runs, under names that are hashes."""

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
_LARGEST_LOADED_BYTES = 1 << 20
"""Larger arrays are mapped; not all, as a corpus may have more files than a process may have mappings."""
_READ_BYTES = 1 << 22
_HEADER = threading.Lock()
"""Held while numpy parses a file's header as Python: before 3.13 two threads may raise SystemError (cpython#106905)."""


def digest_of(values: Sequence[object]) -> str:
    """Hash of what JSON can hold, for names in caches and for identities."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def digest_of_pieces(pieces: Iterable[str]) -> str:
    """Hash of a JSON text that is too long to be made at once: `digest_of` gives the same for what it says."""
    hashed = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        hashed.update(piece.encode())
    return hashed.hexdigest()


def write_once(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file that is not there, in one process of this machine, while the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            write_atomically(path, write)


def cached_array(path: Path, make: Callable[[], NDArray[S]], *, keep: bool = True) -> NDArray[S]:
    """Load an array, or make it in one process of this machine; `keep` saves it. A damaged one is made anew."""
    found = _load(path)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        # Another process may have made it meanwhile.
        found = _load(path)
        if found is None:
            found = make()
            if keep:
                write_atomically(path, _HashedArray(found).write_to)
                if found.nbytes > _LARGEST_LOADED_BYTES:
                    # The array is mapped, as other processes have it, and so it is in the machine's memory once.
                    found = load_array(path)
    return found


def load_array(path: Path, *, is_mapped: bool = True) -> NDArray[Any]:
    """Load a .npy file, in any thread. OSError, ValueError or EOFError: it cannot be read."""
    with _HEADER:
        return np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)


def _load(path: Path) -> NDArray[Any] | None:
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
    """Writes numpy's format and a hash after it, which numpy's own reader does not read.

    To numpy it is no real file: it would write past the hash.
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array, self._hashed = array, xxhash.xxh3_128()

    def write_to(self, out: BinaryIO) -> None:
        self._out = out
        np.lib.format.write_array(self, self._array, allow_pickle=False)
        out.write(self._hashed.digest())

    def write(self, content: bytes) -> int:
        self._hashed.update(content)
        return self._out.write(content)
