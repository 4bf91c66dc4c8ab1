"""Hashes of data files: of both ends, as the identity of a file, and of each part, to tell where a file was edited."""

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
    """Give the identity of each file, several at once, as `identify` does."""
    least_chunk = _QUICK_CHUNK if all(isinstance(file, LocalFile) for file in files) else 1
    return list(thread_map(lambda file: identify(file, column), files, least_chunk=least_chunk))


def identify(file: DataFile, column: str) -> str:
    """Give a hash of a file's size, of its first and last 64 KiB, and of the name of the column that is read from it.

    A copy on another machine has the same identity: times are not part of it, and the parts between the ends have
    hashes of their own. The identity of a remote file is kept under its address and version, so that the next run asks
    nothing. DataError: the file cannot be read.
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
"""XXH3 hash of each part of a file, in order; the same on every machine. Shape [parts]."""

MOST_BYTES = 64 << 30
"""The most bytes of a source's files together that a start reads: a minute of a disk that gives 1 GB/s."""
_LEAST_PART_BYTES, _LEAST_PART_ROWS, _MOST_PARTS = 1 << 12, 1 << 4, 1 << 10
_READ_BYTES = 1 << 22
"""Bytes that are read and hashed at a time."""
_QUICK_CHUNK = 32
"""Files that a thread takes at a time, where each one is quick: two ends, a small file, or hashes that are kept."""
_RECENT_NS = 2 * 10**9
"""A file that was changed so lately could be changed once more without another time of change."""


def part_bytes(size_bytes: int) -> int:
    """Give the bytes of each part of a file but the last: a power of two, 4 KiB or more, for at most 1024 parts."""
    return _part_size(size_bytes, _LEAST_PART_BYTES)


def part_rows(num_rows: int) -> int:
    """Give the rows of each part of a table but the last: a power of two, 16 or more, for at most 1024 parts."""
    return _part_size(num_rows, _LEAST_PART_ROWS)


def _part_size(size: int, least: int) -> int:
    return max(least, 1 << (max(size - 1, 1) // _MOST_PARTS).bit_length())


def digests_of(contents: Contents | None) -> list[str]:
    """Give a list of one hash over the hashes of all parts; an empty list: they are not known."""
    return [] if contents is None else [xxhash.xxh3_128(contents.astype("<u8").tobytes()).hexdigest()]


def is_in_identity(file: DataFile) -> bool:
    """Whether the two ends, of which the identity is made, are the whole file."""
    return file.size_bytes <= 2 * SAMPLE_BYTES


def read_contents(files: Sequence[DataFile], folder: Path) -> None:
    """Hash the parts of files, several at once, and set their `contents`.

    Remote files whose identity covers all of them are left out. The others are fetched whole at a start anyway. Hashes
    of a large file are kept on this machine under its `key`, so that a second start reads nothing.

    Args:
        files: the files.
        folder: the folder under which hashes are kept.

    Raises:
        DataError: a file cannot be read, or has changed.
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
    """Load the hashes that are kept under `key`, or make and keep them.

    Hashes of a file that was changed just now, at `changed_ns` of the clock, are not kept.
    """
    is_old = time.time_ns() - changed_ns > _RECENT_NS
    return cached_array(_kept(key, folder), make, keep=is_old)


def _kept(key: str, folder: Path) -> Path:
    """Give the path of kept hashes."""
    return folder / "contents" / f"{key}.npy"


def _hash_parts(file: DataFile) -> Contents:
    """Read a file, and hash each of its parts."""
    size = part_bytes(file.size_bytes)
    hashes = []
    # Outside of `try`: an OSError of the cache, into which a remote file is fetched, is no error of the file.
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
