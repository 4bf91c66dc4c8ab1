"""A data file, here or on a network, that is read whole or in parts and checked to be unchanged since it was found."""

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
"""Bytes at each end of a file from which its identity is made.

No request for a part of a remote file is smaller, so that an identity or the footer of a table takes one request.
"""
INDEX_AGAIN = "put the old file back, or make the index anew: hfdist index, with another run.name"
"""The hint where a file is not the one that was indexed."""
_FETCHED_BYTES = 16 << 20
"""Bytes of one request where a whole file is fetched."""


class DataFile(ABC):
    """A file that is read, never written. Forked processes may share it: it keeps nothing open."""

    url: str
    """The address as it is shown to people: without user, password or signed query."""
    name: str
    """Path of the file relative to its source."""
    size_bytes: int
    """Size of the file when it was found."""
    version: str
    """Text that changes with the content, as far as the store tells without reading: time of change, ETag, ..."""
    key: str
    """Name for copies and hashes of this file on this machine: a hash of its address, its version and more."""
    contents: NDArray[np.uint64] | None = None
    """Hash of each part of the file, shape [parts]; None: they are not known yet."""
    is_indexed = False
    """Whether size and version were read from an index, and not asked for today."""

    @abstractmethod
    def local(self) -> AbstractContextManager[Path]:
        """Give the path of the whole file on this machine, fetched if it is not here, and kept inside the context.

        DataError: the file cannot be fetched, or has changed since it was found, even while it was read.
        """

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file for seeking and reading parts, such as a footer, without fetching the whole.

        DataError: the file cannot be opened, or has changed since it was found. Later reads raise OSError.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Compare size and version with those that were found at first; DataError: they differ."""


class LocalFile(DataFile):
    """A file on this machine, read where it is; DataError: it is not there.

    Args:
        path: path of the file.
        name: path of the file relative to its source.
    """

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
        # Also before it is read: a mapped file that has become shorter ends the process.
        self.check_unchanged()
        try:
            yield self._path
        finally:
            self.check_unchanged()

    def open(self) -> BinaryIO:
        """Open the file for reading."""
        try:
            return self._path.open("rb")
        except OSError as error:
            raise_unreadable(error, self.url)

    def check_unchanged(self) -> None:
        """Compare the size and the time of change with those that were found; DataError: they differ."""
        status = self._status()
        if (status.st_size, str(status.st_mtime_ns)) != (self.size_bytes, self.version):
            raise _changed(self)

    def _status(self) -> os.stat_result:
        """Ask the system for size and times; DataError: the file cannot be read."""
        try:
            return self._path.stat()
        except OSError as error:
            raise_unreadable(error, self.url)


class RemoteFile(DataFile):
    """A file on a network, read in ranges, or fetched as a whole into the cache of this machine.

    Args:
        address: the whole URL with its query.
        name: path of the file relative to its source.
        details: size and version that the store tells.
        cache: the cache of whole files; its network reads the ranges, too.
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
        """Open the file for reading parts, each by a request of 64 KiB or more."""
        self.check_unchanged()
        return self.open_unchecked()

    def open_unchecked(self) -> BinaryIO:
        """Open the file for reading parts, without the request that asks whether it has changed."""
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self), SAMPLE_BYTES))

    def check_unchanged(self) -> None:
        """Ask the store for size and version again; DataError: they differ."""
        if self._network.details(self.address) != (self.size_bytes, self.version):
            raise _changed(self)

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the whole content into `file`, from its start on; DataError: it has changed, or cannot be read."""
        self.check_unchanged()
        try:
            for start in range(0, self.size_bytes, _FETCHED_BYTES):
                file.write(self._read_range(start, min(start + _FETCHED_BYTES, self.size_bytes)))
        except RangeError:
            self._network.retries.run(lambda: self._fetch_whole(file), self.address)
        # The same version before and after: all ranges are of one file, and not of two.
        self.check_unchanged()

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to before `stop`; where the server gives no ranges, from a fetched copy."""
        try:
            return self._read_range(start, stop)
        except RangeError:
            with self.local() as path, path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

    def _read_range(self, start: int, stop: int) -> bytes:
        """Read a range with retries; RangeError: the server gives whole files only."""

        def read() -> bytes:
            data = self._network.read_range(self.address, start, stop, self.size_bytes)
            self._check_length(len(data), stop - start)
            return data

        return self._network.retries.run(read, self.address)

    def _fetch_whole(self, file: BinaryIO) -> None:
        """Write the whole content into `file` by one request, which a retry begins anew."""
        file.seek(0)
        file.truncate()
        self._network.read_whole(self.address, file)
        self._check_length(file.tell(), self.size_bytes)

    def _check_length(self, found: int, promised: int) -> None:
        """Raise an error, which a retry may help against, if fewer or more bytes have arrived than were promised."""
        if found != promised:
            self.check_unchanged()
            raise EOFError(f"{found} of {promised} bytes arrived")


class _RangeReader(AbstractBufferedFile):
    """A remote file as fsspec reads it, but with our retries, and with errors as Arrow expects them."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        super().__init__(None, file.url, cache_type="none", size=file.size_bytes)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move to a place in the file; OSError: a place before its start, which a damaged footer may name."""
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
    """Give a name for files: the hash of an address and of all else that tells one copy from another."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


def _changed(file: DataFile) -> DataError:
    """Build the error of a file that has changed since it was found."""
    since = "it was indexed" if file.is_indexed else "the run began"
    hint = INDEX_AGAIN if file.is_indexed else "put the old file back, or start a new run (run.name=...)"
    return DataError(f"has changed since {since}", where=file.url, hint=hint)


def raise_unreadable(error: OSError, url: str) -> NoReturn:
    """Raise the DataError of a file that cannot be read: the network's own, where that is the cause."""
    if isinstance(error.__cause__, DataError):
        raise error.__cause__
    raise DataError(f"cannot be read: {error.strerror}", where=url) from error
