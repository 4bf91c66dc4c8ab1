"""A file behind a network."""

from __future__ import annotations

import errno
import hashlib
import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from hfdist.config.checks.urls import redact
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.localfile import changed
from hfdist.data.storage.network import Details, RangeError
from hfdist.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BLOCK_BYTES = 16 << 20
# As much as the identity and the footer of a table take, so that each is one request.
READ_AHEAD_BYTES = 1 << 16


class RemoteFile:
    """A `DataFile` that is read in ranges, or fetched as a whole into the cache of this machine.

    Args:
        address: the whole URL, with its query.
        name: path relative to the source.
        details: as found.
        cache: keeps it, and holds the connections.
    """

    def __init__(self, address: str, name: str, details: Details, cache: FileCache) -> None:
        self.url, self.name = redact(address), name
        self.size_bytes, self.version = details.size_bytes, details.version
        # A hash: nothing in an address can lead out of the cache's folder.
        content = "\0".join((address, self.version, str(self.size_bytes)))
        self.key = hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        self.contents: NDArray[np.uint64] | None = None
        self.cache = cache
        self._address, self._network = address, cache.network

    def local(self) -> AbstractContextManager[Path]:
        """Give it on this machine; see `FileCache.fetch`."""
        return self.cache.fetch(self)

    def open(self) -> BinaryIO:
        """Open it for reading parts, each a request, 64 KiB at least.

        Raises:
            DataError: it has changed since it was found, or there is no answer; reads raise OSError.
        """
        self.check_unchanged()
        return self.open_unchecked()

    def open_unchecked(self) -> BinaryIO:
        """Open it without asking whether it has changed, which takes a request."""
        return cast(BinaryIO, io.BufferedReader(_Reader(self), READ_AHEAD_BYTES))

    def check_unchanged(self) -> None:
        """Compare size and version with those found at first.

        Raises:
            DataError: they are others, or there is no answer.
        """
        if self._network.details(self._address) != Details(self.size_bytes, self.version):
            raise changed(self.url)

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to before `stop`; from a fetched copy where the server has no ranges.

        Raises:
            DataError: no answer, or the file has changed.
        """
        try:
            return self._read_range(start, stop)
        except RangeError:
            with self.local() as path, path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the whole content from the start of `file` on.

        Raises:
            DataError: no answer, or the file has changed.
            OSError: the disk.
        """
        self.check_unchanged()
        try:
            for start in range(0, self.size_bytes, _BLOCK_BYTES):
                file.write(self._read_range(start, min(start + _BLOCK_BYTES, self.size_bytes)))
        except RangeError:
            self._network.retries.run(lambda: self._fetch_whole(file), self._address)
        # What was read in between is one file, and not parts of two.
        self.check_unchanged()

    def _read_range(self, start: int, stop: int) -> bytes:
        def read() -> bytes | None:
            try:
                data = self._network.read_range(self._address, start, stop, self.size_bytes)
            except RangeError:
                # Not a failure to try again.
                return None
            self._check_length(len(data), stop - start)
            return data

        data = self._network.retries.run(read, self._address)
        if data is None:
            raise RangeError
        return data

    def _fetch_whole(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate()
        self._network.read_whole(self._address, file)
        self._check_length(file.tell(), self.size_bytes)

    def _check_length(self, found: int, promised: int) -> None:
        if found != promised:
            self.check_unchanged()
            raise EOFError(f"{found} of {promised} bytes arrived")


class _Reader(io.RawIOBase):
    """Where one reader stands in a remote file."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size_bytes}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "a place before the start of the file")
        self._place = start + offset
        return self._place

    def readall(self) -> bytes:
        # One request; the base class makes one for each 8 KiB.
        data = bytearray(max(0, self._file.size_bytes - self._place))
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._file.size_bytes - self._place))
        if count:
            try:
                view[:count] = self._file.read_range(self._place, self._place + count)
            except DataError as error:
                raise OSError(errno.EIO, f"{error.what}: {error.where}") from error
        self._place += count
        return count
