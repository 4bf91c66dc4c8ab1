"""What a file holds, as hashes: of its ends for its identity, and of each part, to tell where it was edited."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from hfdist.atomic_write import write_atomically
from hfdist.data.cache import cached_array
from hfdist.data.storage.files import SAMPLE_BYTES, DataFile, LocalFile, RemoteFile, raise_unreadable
from hfdist.data.threads import thread_map


def identify_all(files: Sequence[DataFile], column: str) -> list[str]:
    """Identify files, several at once: see `identify`."""
    return list(thread_map(lambda file: identify(file, column), files))


def identify(file: DataFile, column: str) -> str:
    """Hash a file's size, its first and last 64 KiB, and the name of the column that is read from it.

    The identity is the same for a copy on another machine: times are not part of it. What lies between the ends is for
    `read_contents`. That of a remote file is kept under its address and version, so that the next run asks nothing.
    DataError where it cannot be read.
    """
    if not isinstance(file, RemoteFile):
        return _digest(file, file.open, column)
    name = hashlib.blake2b(f"{file.key}:{column}".encode(), digest_size=20).hexdigest()
    kept = file.cache.folder / "identities" / name
    if kept.exists():
        return kept.read_text()
    identity = _digest(file, file.open_unchecked, column)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, identity.encode())
    return identity


def _digest(file: DataFile, open_file: Callable[[], BinaryIO], column: str) -> str:
    digest = hashlib.blake2b(f"{file.size_bytes}:{column}:".encode(), digest_size=12)
    try:
        with open_file() as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, file.size_bytes - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        raise_unreadable(error, file.url)
    return digest.hexdigest()


Contents = NDArray[np.uint64]
"""XXH3 of each part, in order; the same on every machine. Shape [parts]."""

MOST_BYTES = 64 << 30
"""Largest size of all files of a source that a start reads: a minute of a disk that gives 1 GB/s."""
_LEAST_PART_BYTES, _LEAST_PART_ROWS, _MOST_PARTS = 1 << 12, 1 << 4, 1 << 10
_READ_BYTES = 1 << 22
_QUICK_CHUNK = 32
"""Files that a thread reads at a time, of small ones and of those whose hashes are kept."""
_RECENT_NS = 2 * 10**9
"""A file that was changed so lately could be changed once more without another time of change."""


def part_bytes(size_bytes: int) -> int:
    """Give the size of each part but the last: a power of two, 4 KiB at least, so that a file has 1024 at the most."""
    return _part_size(size_bytes, _LEAST_PART_BYTES)


def part_rows(num_rows: int) -> int:
    """Give the number of rows of each part but the last of a table: as `part_bytes`, but 16 at least."""
    return _part_size(num_rows, _LEAST_PART_ROWS)


def _part_size(size: int, least: int) -> int:
    return max(least, 1 << (max(size - 1, 1) // _MOST_PARTS).bit_length())


def digests_of(contents: Contents | None) -> list[str]:
    """Give a list of one hash of all parts; an empty one where they are not known."""
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
    quick = [file for file in read_here if is_in_identity(file) or _kept(file.key, folder).is_file()]
    known = set(quick)
    slow = [file for file in read_here if file not in known]
    for some, least_chunk in ((quick, _QUICK_CHUNK), (slow, 1)):
        for file, contents in zip(some, thread_map(read, some, least_chunk=least_chunk), strict=True):
            file.contents = contents


def cached_contents(key: str, folder: Path, make: Callable[[], Contents], *, changed_ns: int) -> Contents:
    """Load hashes that are kept under `key`, or make them; those of a file that was changed just now are not kept."""
    is_old = time.time_ns() - changed_ns > _RECENT_NS
    return cached_array(_kept(key, folder), make, keep=is_old)


def _kept(key: str, folder: Path) -> Path:
    return folder / "contents" / f"{key}.npy"


def _hash_parts(file: DataFile) -> Contents:
    size = part_bytes(file.size_bytes)
    hashes = []
    # Outside: an error of the cache, into which a remote file is fetched, is none of the file.
    with file.local() as path:
        try:
            with path.open("rb") as opened:
                for start in range(0, file.size_bytes, size):
                    hashed, left = xxhash.xxh3_64(), min(size, file.size_bytes - start)
                    while left and (piece := opened.read(min(left, _READ_BYTES))):
                        hashed.update(piece)
                        left -= len(piece)
                    hashes.append(hashed.intdigest())
        except OSError as error:
            raise_unreadable(error, file.url)
    return np.array(hashes, dtype=np.uint64)
