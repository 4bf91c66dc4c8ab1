"""What identifies a file, wherever it is: the same for a local file and its remote copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from hfdist.data.cache.files import write_atomically
from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.remotefile import READ_AHEAD_BYTES, RemoteFile
from hfdist.data.storage.thread_map import thread_map
from hfdist.errors import DataError

# One request each.
SAMPLE_BYTES = READ_AHEAD_BYTES
_DIGEST_BYTES = 12


def identify(file: DataFile, column: str) -> str:
    """Hash of a file's size, of its first and last 64 KiB, and of the column that is read from it.

    Not of its times: a copy on another machine is the same data. What stands between the ends is for `contents.py`.
    What was found for a remote file is kept under its address and version, so that the next run asks nothing.

    Raises:
        DataError: it cannot be read.
    """
    if not isinstance(file, RemoteFile):
        return _digest(file, column)
    kept = _kept(file, column)
    if kept.exists():
        return kept.read_text()
    identity = _digest(file, column)

    def write(out: BinaryIO) -> None:
        out.write(identity.encode())

    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, write)
    return identity


def identify_all(files: Sequence[DataFile], column: str) -> list[str]:
    """Identify many files, several at once. Raises as `identify` does."""
    return list(thread_map(lambda file: identify(file, column), files))


def _digest(file: DataFile, column: str) -> str:
    digest = hashlib.blake2b(f"{file.size_bytes}:{column}:".encode(), digest_size=_DIGEST_BYTES)
    try:
        with file.open_unchecked() if isinstance(file, RemoteFile) else file.open() as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, file.size_bytes - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file.url) from error
    return digest.hexdigest()


def _kept(file: RemoteFile, column: str) -> Path:
    name = hashlib.blake2b(f"{file.key}:{column}".encode(), digest_size=20).hexdigest()
    return file.cache.folder / "identities" / name
