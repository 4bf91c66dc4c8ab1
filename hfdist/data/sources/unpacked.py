"""Compressed files, unpacked while they are read from the start, or once into the cache of files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa

from hfdist.data.sources.base import ContentError, damage, expands_too_much
from hfdist.data.storage.files import DataFile, key_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CODECS = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names of the codecs, by the endings of file names."""
PIECE_BYTES = 1 << 20
"""Bytes that are read at a time."""
_MOST_UNPACKED_BYTES = 1 << 30
"""Bytes that an unpacked file may always have; more only if the packed file is large, too."""


@contextmanager
def open_unpacked(file: DataFile, codec: str | None) -> Iterator[io.BufferedReader]:
    """Open a file for reading from its start on; with a `codec`, what is read is unpacked.

    Reading raises a ContentError where the file is damaged, cut off, or expands far more than text does.
    """
    with file.local() as path:
        if codec is None:
            with path.open("rb") as plain:
                yield plain
            return
        # zstandard's own reader would take a file that is cut off for one that ends there; Arrow's does not.
        with pa.OSFile(str(path)) as packed, pa.CompressedInputStream(packed, codec) as stream:
            yield io.BufferedReader(_UnpackingStream(stream, file), PIECE_BYTES)


class UnpackedFile:
    """The unpacked form of a file, which the cache of files can keep: it has a key, a size and `fetch_into`."""

    def __init__(self, packed: DataFile, size_bytes: int, codec: str) -> None:
        self.url = packed.url
        self.size_bytes = size_bytes
        # The key holds no address, which may be a relative path: two folders may have files of one size and time.
        self.key = key_of(packed.key, "unpacked")
        self._packed, self._codec = packed, codec

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the unpacked bytes into an open file of the cache."""
        with open_unpacked(self._packed, self._codec) as unpacked:
            shutil.copyfileobj(unpacked, file, PIECE_BYTES)


class _UnpackingStream(io.RawIOBase):
    """A stream of unpacked bytes, whose errors name the file, and which fails before it fills a disk."""

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
        if expands_too_much(self._file.size_bytes, self._num_bytes, allowed_bytes=_MOST_UNPACKED_BYTES):
            raise ContentError(
                "the compressed file expands beyond reason",
                where=self._file.url,
                found=f"{self._file.size_bytes:,} bytes that become more than {self._num_bytes:,}",
            )
        return count
