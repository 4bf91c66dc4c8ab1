"""Questions to remote stores through fsspec: one file system per process and scheme, every answer asked for again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

from fsspec import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.data.storage.retries import Retries
from hfdist.errors import DataError

T = TypeVar("T")

_CONNECT_SECONDS, _SILENCE_SECONDS = 10, 30
# What tells the content apart, in the terms of the stores; the first that is there counts.
_VERSIONS = ("ETag", "etag", "blob_id", "generation", "Content-MD5", "Last-Modified")


class RangeError(Exception):
    """The server gives whole files only."""


@dataclass(frozen=True)
class Details:
    """What a store tells about a file without reading it."""

    size_bytes: int
    version: str


@dataclass(frozen=True)
class Network:
    """Opens file systems; forked processes may share it."""

    retries: Retries = field(default_factory=Retries)
    _opened: dict[tuple[int, str], AbstractFileSystem] = field(default_factory=dict, repr=False, compare=False)

    def ask(self, address: str, question: Callable[[AbstractFileSystem], T]) -> T:
        """Put a question to the file system that `address` names, with retries.

        Raises:
            DataError: no answer.
        """
        return self.retries.run(lambda: question(self._store(address)), address)

    def info(self, address: str) -> dict[str, Any]:
        """Ask for all that fsspec tells about a file or folder.

        Raises:
            DataError: no answer.
        """

        def question(store: AbstractFileSystem) -> dict[str, Any]:
            store.invalidate_cache()
            found: dict[str, Any] = store.info(address)
            return found

        return self.ask(address, question)

    def details(self, address: str) -> Details:
        """Ask for size and version.

        Raises:
            DataError: no answer, or one without a size.
        """
        return details_in(self.info(address), address)

    def read_range(self, address: str, start: int, stop: int, size_bytes: int) -> bytes:
        """Read the bytes from `start` to before `stop`, in one request. One attempt: see `ask`.

        Raises:
            RangeError: the server gives whole files only.
            Exception: whatever the library of the store raises.
        """
        store = self._store(address)
        if scheme_of(address) in ("s3", "gs"):
            data: bytes = store.cat_file(address, start=start, end=stop)
            return data
        # Not `cat_file`: where a server ignores the range, that takes the whole file into memory.
        with store.open(address, "rb", size=size_bytes, cache_type="none") as file:
            file.seek(start)
            try:
                return bytes(file.read(stop - start))
            except ValueError as error:
                raise RangeError from error

    def read_whole(self, address: str, file: BinaryIO) -> None:
        """Stream everything into `file`. One attempt: see `ask`."""
        self._store(address).get_file(address, file)

    def _store(self, address: str) -> AbstractFileSystem:
        scheme = (scheme_of(address) or "file").replace("https", "http")
        place = (os.getpid(), scheme)
        # Those of the parent process stay here unused. fsspec forgets its own at a fork, and would close them: that
        # takes their sockets out of the epoll set, which both processes share, and the parent waits for ever.
        if place not in self._opened:
            self._opened.setdefault(place, _open(scheme))
        return self._opened[place]


def details_in(info: dict[str, Any], address: str) -> Details:
    """Read the size and the version from what fsspec tells about a file.

    Raises:
        DataError: the store does not tell the size.
    """
    if not isinstance(info.get("size"), int):
        raise DataError("the server does not tell the size of the file", where=redact(address))
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return Details(info["size"], version or f"{info['size']} bytes")


def _open(scheme: str) -> AbstractFileSystem:
    store = get_filesystem_class(scheme)(skip_instance_cache=True, **_settings(scheme))
    if scheme == "s3":
        # `Retries` counts and bounds the attempts; these would multiply them.
        store.retries = 1
    return store


def _settings(scheme: str) -> dict[str, Any]:
    if scheme == "s3":
        waits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENCE_SECONDS}
        return {"config_kwargs": {"retries": {"total_max_attempts": 1}, **waits}}
    if scheme == "http":
        import aiohttp

        # By default a file that takes more than five minutes fails.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        # The bytes as they are stored: some servers declare .gz files as encoded, and they would arrive unpacked.
        client = {"timeout": timeout, "auto_decompress": False, "trust_env": True}
        return {"client_kwargs": {**client, "headers": {"Accept-Encoding": "identity"}}}
    return {}
