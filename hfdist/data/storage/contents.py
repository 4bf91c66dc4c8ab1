"""What a file holds, as a hash of each of its parts: which tells whether, and where, two of its versions differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.data.cache.arrays import load_array, save_array
from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.identity import SAMPLE_BYTES
from hfdist.data.storage.localfile import LocalFile
from hfdist.data.storage.thread_map import thread_map
from hfdist.data.storage.verified_file import whole_file

Contents = NDArray[np.uint64]
"""XXH3 of each part, in order; the same on every machine. Shape [parts]."""

# What all files of a source may be together for a start to read them: a minute of a disk that gives 1 GB/s.
MOST_BYTES = 64 << 30
_LEAST_PART_BYTES, _LEAST_PART_ROWS, _MOST_PARTS = 1 << 12, 1 << 4, 1 << 10
_READ_BYTES = 1 << 22
# A file that was changed so lately could be changed once more without another time of change.
_SETTLED_NS = 2 * 10**9


def part_bytes(size_bytes: int) -> int:
    """Size of each part but the last of a file: a power of two, 4 KiB at least, so that there are 1024 at the most."""
    return max(_LEAST_PART_BYTES, 1 << (max(size_bytes - 1, 1) // _MOST_PARTS).bit_length())


def part_rows(num_rows: int) -> int:
    """The same of rows, 16 at least."""
    return max(_LEAST_PART_ROWS, 1 << (max(num_rows - 1, 1) // _MOST_PARTS).bit_length())


def digests_of(contents: Contents | None) -> list[str]:
    """One hash of all parts; none where they are not known."""
    return [] if contents is None else [xxhash.xxh3_128(contents.astype("<u8").tobytes()).hexdigest()]


def is_in_identity(file: DataFile) -> bool:
    """Whether the identity of a file is of all that it holds."""
    return file.size_bytes <= 2 * SAMPLE_BYTES


def read_contents(files: Sequence[DataFile], folder: Path) -> None:
    """Set `contents` of files, several at once; not of remote ones whose identity is of all that they hold.

    What was found of a large one is kept on this machine under the file's address, size, times and number, so that a
    second start reads nothing. Of a remote file, which is fetched for it, under its address and version.

    Args:
        files: local, or such as are fetched whole at a start anyway.
        folder: of this machine's caches.

    Raises:
        DataError: one cannot be read, or has changed since it was found.
    """

    def read(file: DataFile) -> Contents:
        if is_in_identity(file):
            return _hash_parts(file)
        changed_ns = file.changed_ns if isinstance(file, LocalFile) else 0
        return kept(file.key, folder, lambda: _hash_parts(file), changed_ns=changed_ns)

    read_here = [file for file in files if isinstance(file, LocalFile) or not is_in_identity(file)]
    for file, contents in zip(read_here, thread_map(read, read_here), strict=True):
        file.contents = contents


def kept(key: str, folder: Path, make: Callable[[], Contents], *, changed_ns: int) -> Contents:
    """Give what `make` gives, which one process of this machine does once.

    Args:
        key: a file name; changes with what `make` reads.
        folder: of this machine's caches.
        make: reads it all.
        changed_ns: when that was changed last; what was changed just now is not kept.
    """
    path = folder / "contents" / f"{key}.npy"
    found = load_array(path)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        # Another process may have read it meanwhile.
        found = load_array(path)
        if found is None:
            is_settled = time.time_ns() - changed_ns > _SETTLED_NS
            found = make()
            if is_settled:
                save_array(path, found)
    return found


def _hash_parts(file: DataFile) -> Contents:
    size = part_bytes(file.size_bytes)
    hashes = []
    with whole_file(file) as path, path.open("rb") as opened:
        for start in range(0, file.size_bytes, size):
            hashed, left = xxhash.xxh3_64(), min(size, file.size_bytes - start)
            while left and (piece := opened.read(min(left, _READ_BYTES))):
                hashed.update(piece)
                left -= len(piece)
            hashes.append(hashed.intdigest())
    return np.array(hashes, dtype=np.uint64)
