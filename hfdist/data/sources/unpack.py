"""Compressed files: read from the start on, or unpacked into the cache, never more than text could become."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa

from hfdist.data.sources.base import ContentError, damage
from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.verified_file import check_here, whole_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MOST_EXPANSION = 1000
_LEAST_BOMB_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 20


def expands_too_much(packed_bytes: int, unpacked_bytes: int) -> bool:
    """Whether no text would do so: such files are made to fill memories and disks."""
    return unpacked_bytes > max(_MOST_EXPANSION * packed_bytes, _LEAST_BOMB_BYTES)


@contextmanager
def open_unpacked(file: DataFile) -> Iterator[io.BufferedReader]:
    """Open a file for reading from its start on, unpacked where its name ends with .gz or .zst.

    Raises:
        DataError: it cannot be fetched, or has changed. Reading raises ContentError where it is damaged, cut off, or
            becomes far more than text does.
    """
    with whole_file(file) as path:
        codec = _codec(file)
        if codec is None:
            with path.open("rb") as plain:
                yield plain
            return
        # Arrow's reader, because zstandard's takes a file that is cut off for one that ends there.
        with pa.OSFile(str(path)) as packed, pa.CompressedInputStream(packed, codec) as stream:
            yield io.BufferedReader(_Unpacking(stream, file), _BUFFER_BYTES)


def whole_unpacked(file: DataFile, size_bytes: int, cache: FileCache) -> AbstractContextManager[Path]:
    """Give a file for reading anywhere: itself, or its unpacked form, of `size_bytes`, in the cache.

    Raises:
        DataError: see `open_unpacked`.
        ResourceError: it is larger than the cache, or the disk is full.
    """
    if _codec(file) is None:
        return whole_file(file)
    check_here(file)
    return cache.fetch(_Unpacked(file, size_bytes))


def is_packed(file: DataFile) -> bool:
    """Whether it is unpacked before it is read."""
    return _codec(file) is not None


def _codec(file: DataFile) -> str | None:
    return _CODECS.get(Path(file.name).suffix)


class _Unpacked:
    """What the cache asks of a file that it keeps."""

    def __init__(self, packed: DataFile, size_bytes: int) -> None:
        self.url, self.size_bytes = packed.url, size_bytes
        content = "\0".join((packed.url, packed.version, str(packed.size_bytes), "unpacked"))
        self.key = hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        self._packed = packed

    def fetch_into(self, file: BinaryIO) -> None:
        with open_unpacked(self._packed) as unpacked:
            shutil.copyfileobj(unpacked, file, _BUFFER_BYTES)


class _Unpacking(io.RawIOBase):
    """A compressed stream whose damage names the file, and which ends before it fills a disk."""

    def __init__(self, stream: pa.CompressedInputStream, file: DataFile) -> None:
        self._stream, self._file, self._num_bytes = stream, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            count: int = self._stream.readinto(buffer)
        except (pa.ArrowException, OSError) as error:
            raise damage("the compressed file is damaged or cut off", error, where=self._file.url) from error
        self._num_bytes += count
        if expands_too_much(self._file.size_bytes, self._num_bytes):
            raise ContentError(
                "the compressed file expands beyond reason",
                where=self._file.url,
                found=f"{self._file.size_bytes:,} bytes that become more than {self._num_bytes:,}",
            )
        return count
