"""What a file holds, as a hash of each of its parts: which tells whether, and where, two of its versions differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hfdist.data.cache import cached_array
from hfdist.data.storage.files import SAMPLE_BYTES, DataFile, LocalFile
from hfdist.data.storage.thread_map import thread_map

Contents = NDArray[np.uint64]
"""XXH3 of each part, in order; the same on every machine. Shape [parts]."""

# The largest size of all files of a source that is read at a start: a minute of a disk that gives 1 GB/s.
MOST_BYTES = 64 << 30
_LEAST_PART_BYTES, _LEAST_PART_ROWS, _MOST_PARTS = 1 << 12, 1 << 4, 1 << 10
_READ_BYTES = 1 << 22
# A file that was changed so lately could be changed once more without another time of change.
_RECENT_NS = 2 * 10**9


def part_bytes(size_bytes: int) -> int:
    """Size of each part but the last of a file: a power of two, 4 KiB at least, so that there are 1024 at the most."""
    return _part_size(size_bytes, _LEAST_PART_BYTES)


def part_rows(num_rows: int) -> int:
    """The same of rows, 16 at least."""
    return _part_size(num_rows, _LEAST_PART_ROWS)


def _part_size(size: int, least: int) -> int:
    return max(least, 1 << (max(size - 1, 1) // _MOST_PARTS).bit_length())


def digests_of(contents: Contents | None) -> list[str]:
    """One hash of all parts; none where they are not known."""
    return [] if contents is None else [xxhash.xxh3_128(contents.astype("<u8").tobytes()).hexdigest()]


def is_in_identity(file: DataFile) -> bool:
    """Whether the identity of a file is of all that it holds."""
    return file.size_bytes <= 2 * SAMPLE_BYTES


def read_contents(files: Sequence[DataFile], folder: Path) -> None:
    """Set `contents` of files, several at once; not of remote ones whose identity is of all that they hold.

    The files are local, or fetched whole at a start anyway. What was found of a large one is kept on this machine under
    its `key`, so that a second start reads nothing. DataError where one cannot be read, or has changed.
    """

    def read(file: DataFile) -> Contents:
        if is_in_identity(file):
            return _hash_parts(file)
        changed_ns = file.changed_ns if isinstance(file, LocalFile) else 0
        return cached_contents(file.key, folder, lambda: _hash_parts(file), changed_ns=changed_ns)

    read_here = [file for file in files if isinstance(file, LocalFile) or not is_in_identity(file)]
    for file, contents in zip(read_here, thread_map(read, read_here), strict=True):
        file.contents = contents


def cached_contents(key: str, folder: Path, make: Callable[[], Contents], *, changed_ns: int) -> Contents:
    """Give what `make` gives, from the cache under `key` where it is there; what was changed just now is not kept."""
    is_old = time.time_ns() - changed_ns > _RECENT_NS
    return cached_array(folder / "contents" / f"{key}.npy", make, keep=is_old)


def _hash_parts(file: DataFile) -> Contents:
    size = part_bytes(file.size_bytes)
    hashes = []
    with file.local() as path, path.open("rb") as opened:
        for start in range(0, file.size_bytes, size):
            hashed, left = xxhash.xxh3_64(), min(size, file.size_bytes - start)
            while left and (piece := opened.read(min(left, _READ_BYTES))):
                hashed.update(piece)
                left -= len(piece)
            hashes.append(hashed.intdigest())
    return np.array(hashes, dtype=np.uint64)
