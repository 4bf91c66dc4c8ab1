"""A file here or on a network: read whole or in parts, and checked to be the one that was found."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import numpy as np
from fsspec.spec import AbstractBufferedFile
from numpy.typing import NDArray

from hfdist.config.checks.urls import redact
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.network import Details, RangeError
from hfdist.errors import DataError

SAMPLE_BYTES = 1 << 16
"""Bytes of each end of a file that its identity is made of.

No request for a part of a remote file is smaller, so that the identity and the footer of a table take one each.
"""
INDEX_AGAIN = "put the old file back, or make the index anew: hfdist index, with another run.name"
"""What to do where a file is another one than its index says."""
_FETCHED_BYTES = 16 << 20
"""Bytes of one request where a whole file is fetched."""


class DataFile(ABC):
    """A file that is read, never written. Usable in forked processes: nothing open is kept."""

    url: str
    """The address as it is shown to people: without user, password or signed query."""
    name: str
    """Path relative to the source."""
    size_bytes: int
    version: str
    """Changes with the content, as far as the store tells without reading: time of change, ETag, ..."""
    key: str
    """A file name, made of address, version and all else that this machine knows of it."""
    contents: NDArray[np.uint64] | None = None
    """Hashes of its parts, once they are known: see `read_contents`."""
    is_indexed = False
    """Whether size and version are those of an index, and not of today."""

    @abstractmethod
    def local(self) -> AbstractContextManager[Path]:
        """Give the whole file on this machine, fetched where it is not yet, and kept from eviction inside the context.

        DataError: it cannot be fetched, or has changed since it was found, even while it was read.
        """

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open it for seeking and reading parts, such as a footer, without fetching the whole.

        DataError: see `local`; later reads raise OSError.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Compare size and version with those that were found at first; DataError where they are others."""


class LocalFile(DataFile):
    """A file on this machine, read where it is; DataError where it is not there."""

    def __init__(self, path: Path, name: str) -> None:
        self.url, self.name, self._path = str(path), name, path
        status = self._status()
        self.size_bytes, self.version = status.st_size, str(status.st_mtime_ns)
        self.changed_ns = status.st_ctime_ns
        """Time of the last change of any kind; unlike `version`, nobody can set it back."""
        known = [str(path.absolute()), self.size_bytes, self.version, self.changed_ns, status.st_ino]
        self.key = hashlib.blake2b(json.dumps(known).encode(), digest_size=20).hexdigest()

    @contextmanager
    def local(self) -> Iterator[Path]:
        """Give the path itself."""
        # Before, too: a mapped file that has become shorter ends the process.
        self.check_unchanged()
        try:
            yield self._path
        finally:
            self.check_unchanged()

    def open(self) -> BinaryIO:
        """Open it for reading."""
        try:
            return self._path.open("rb")
        except OSError as error:
            raise_unreadable(error, self.url)

    def check_unchanged(self) -> None:
        """Compare size and time of change."""
        status = self._status()
        if (status.st_size, str(status.st_mtime_ns)) != (self.size_bytes, self.version):
            raise _changed(self)

    def _status(self) -> os.stat_result:
        try:
            return self._path.stat()
        except OSError as error:
            raise_unreadable(error, self.url)


class RemoteFile(DataFile):
    """A file on a network, read in ranges, or fetched as a whole into the cache of this machine.

    `address` is the whole URL with its query, and `cache` holds the connections, too.
    """

    def __init__(self, address: str, name: str, details: Details, cache: FileCache) -> None:
        self.url, self.name = redact(address), name
        self.size_bytes, self.version = details
        # A hash: nothing in an address can lead out of the cache's folder.
        self.key = key_of(address, self.version, str(self.size_bytes))
        self.cache = cache
        self.address, self._network = address, cache.network

    def local(self) -> AbstractContextManager[Path]:
        """Give a copy in the cache, of the version that was found."""
        return self.cache.fetch(self)

    def open(self) -> BinaryIO:
        """Open it for reading parts, each a request, 64 KiB at least."""
        self.check_unchanged()
        return self.open_unchecked()

    def open_unchecked(self) -> BinaryIO:
        """Open it without the request that `open` begins with, which asks whether it has changed."""
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self), SAMPLE_BYTES))

    def check_unchanged(self) -> None:
        """Ask for size and version again."""
        if self._network.details(self.address) != (self.size_bytes, self.version):
            raise _changed(self)

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the whole content from the start of `file` on; DataError where it has changed or is out of reach."""
        self.check_unchanged()
        try:
            for start in range(0, self.size_bytes, _FETCHED_BYTES):
                file.write(self._read_range(start, min(start + _FETCHED_BYTES, self.size_bytes)))
        except RangeError:
            self._network.retries.run(lambda: self._fetch_whole(file), self.address)
        # So what was read in between is of one file, and not of two.
        self.check_unchanged()

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to before `stop`; from a fetched copy where the server has no ranges."""
        try:
            return self._read_range(start, stop)
        except RangeError:
            with self.local() as path, path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

    def _read_range(self, start: int, stop: int) -> bytes:
        def read() -> bytes:
            data = self._network.read_range(self.address, start, stop, self.size_bytes)
            self._check_length(len(data), stop - start)
            return data

        return self._network.retries.run(read, self.address)

    def _fetch_whole(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate()
        self._network.read_whole(self.address, file)
        self._check_length(file.tell(), self.size_bytes)

    def _check_length(self, found: int, promised: int) -> None:
        if found != promised:
            self.check_unchanged()
            raise EOFError(f"{found} of {promised} bytes arrived")


class _RangeReader(AbstractBufferedFile):
    """A remote file as fsspec reads it, but with our retries, and with errors as Arrow expects them."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        super().__init__(None, file.url, cache_type="none", size=file.size_bytes)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move as any file does: to a place before the start, which a damaged file may name, is an OSError."""
        try:
            return cast(int, super().seek(loc, whence))
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return self._file.read_range(start, min(end, self._file.size_bytes))
        except DataError as error:
            raise OSError(errno.EIO, f"{error.what}: {error.where}") from error


def key_of(*parts: str) -> str:
    """Give a file name: the hash of an address and of all else that tells one copy from another."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


def _changed(file: DataFile) -> DataError:
    since = "it was indexed" if file.is_indexed else "the run began"
    hint = INDEX_AGAIN if file.is_indexed else "put the old file back, or start a new run (run.name=...)"
    return DataError(f"has changed since {since}", where=file.url, hint=hint)


def raise_unreadable(error: OSError, url: str) -> NoReturn:
    """Raise a DataError of a file that cannot be read: what the network said, where that is the cause."""
    if isinstance(error.__cause__, DataError):
        raise error.__cause__
    raise DataError(f"cannot be read: {error.strerror}", where=url) from error
