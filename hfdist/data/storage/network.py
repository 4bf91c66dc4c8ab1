"""Questions to remote stores through fsspec, asked again when they fail; one file system per process and scheme."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple, TypeVar

from fsspec import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.errors import DataError, HfdistError
from hfdist.failures import causes, is_full_disk, is_network, seconds_before_retry

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for a public bucket",
    "hf": "set HF_TOKEN, and accept the dataset's terms on its page",
    "http": "credentials for the host in ~/.netrc",
}
_CONNECT_SECONDS, _SILENCE_SECONDS = 10, 30
_VERSIONS = ("ETag", "etag", "blob_id", "generation", "Content-MD5", "Last-Modified")
"""Names that stores give to a text which changes with the content; the first one that a store tells is the version."""


class RangeError(Exception):
    """The server gives whole files only."""


class Details(NamedTuple):
    """The facts that a store tells about a file without reading it."""

    size_bytes: int
    version: str
    """Text that changes with the content."""


class Failure(NamedTuple):
    """The words of the error when no attempt has helped."""

    what: str
    """What was wrong; the reason follows it."""
    hint: str
    """What the user can do."""


READING = Failure(
    "cannot be read", "check the address and the network, then start again: files that are already here are kept"
)


@dataclass(frozen=True)
class Retries:
    """Limits within which a failed request is repeated."""

    attempts: int = 6
    """The most attempts, the first one included."""
    first_wait_seconds: float = 1.0
    """Wait before the second attempt; each later wait is twice as long, give or take a half."""
    total_seconds: float = 60.0
    """No attempt starts later than so many seconds after the first."""

    def run(self, action: Callable[[], T], address: str, failure: Failure = READING) -> T:
        """Call `action` until it gives a result, which is returned.

        Args:
            action: makes the request. Its HfdistError or RangeError is raised at once.
            address: address of the file, for messages.
            failure: the words of the error when no attempt has helped.

        Raises:
            DataError: no answer after the last attempt, or one that trying again does not change (403, 404).
            OSError: the disk is full.
        """
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return action()
            except (HfdistError, RangeError):
                raise
            except Exception as error:
                if is_full_disk(error):
                    raise
                wait_seconds = seconds_before_retry(attempt, self.first_wait_seconds)
                late = time.monotonic() - started + wait_seconds > self.total_seconds
                if not _is_temporary(error) or attempt == self.attempts or late:
                    raise _explained(error, address, attempt, failure) from error
                reason = _reason(error)
            logger.warning(
                "%s: %s; attempt %d of %d in %.1f s", redact(address), reason, attempt + 1, self.attempts, wait_seconds
            )
            time.sleep(wait_seconds)


@dataclass(frozen=True)
class Network:
    """The file systems of remote stores, each opened when it is first asked; forked processes may share this."""

    retries: Retries = field(default_factory=Retries)
    _opened: dict[tuple[int, str], AbstractFileSystem] = field(default_factory=dict, repr=False, compare=False)

    def ask(self, address: str, question: Callable[[AbstractFileSystem], T], failure: Failure = READING) -> T:
        """Give the answer of the file system that `address` names to a question, with retries.

        The file system's cache of listings is emptied first. DataError, in the words of `failure`: there is no answer.
        """

        def ask_once() -> T:
            store = self._store(address)
            store.invalidate_cache()
            return question(store)

        return self.retries.run(ask_once, address, failure)

    def details(self, address: str) -> Details:
        """Ask for the size and version of a file; DataError: there is no answer, or one without a size."""
        return details_in(self.ask(address, lambda store: store.info(address)), address)

    def read_range(self, address: str, start: int, stop: int, size_bytes: int) -> bytes:
        """Read the bytes from `start` to before `stop`, by one request without retries.

        RangeError: the server gives whole files only. Other errors are those of the store's library.
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
        """Stream the whole content into `file`, by one request without retries."""
        self._store(address).get_file(address, file)

    def _store(self, address: str) -> AbstractFileSystem:
        scheme = (scheme_of(address) or "file").replace("https", "http")
        place = (os.getpid(), scheme)
        # File systems of the parent process stay here unused. fsspec forgets its own at a fork, and would close them:
        # that takes their sockets out of the epoll set, which both processes share, and the parent waits for ever.
        if place not in self._opened:
            self._opened.setdefault(place, _open(scheme))
        return self._opened[place]


def details_in(info: Mapping[str, object], address: str) -> Details:
    """Read the size and version from fsspec's facts about a file; DataError: the store does not tell the size."""
    size = info.get("size")
    if not isinstance(size, int):
        raise DataError("the server does not tell the size of the file", where=redact(address))
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return Details(size, version or f"{size} bytes")


def _open(scheme: str) -> AbstractFileSystem:
    settings: dict[str, object] = {}
    if scheme == "s3":
        waits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENCE_SECONDS}
        settings = {"config_kwargs": {"retries": {"total_max_attempts": 1}, **waits}}
    elif scheme == "http":
        import aiohttp

        # Without it, a file that takes more than five minutes would fail.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        # Bytes come as they are stored: some servers declare .gz files as encoded, which would arrive unpacked.
        client = {"timeout": timeout, "auto_decompress": False, "trust_env": True}
        settings = {"client_kwargs": {**client, "headers": {"Accept-Encoding": "identity"}}}
    store = get_filesystem_class(scheme)(skip_instance_cache=True, **settings)
    if scheme == "s3":
        # Attempts of the library itself would multiply those of `Retries`.
        store.retries = 1
    return store


def _status(error: BaseException) -> int | None:
    """Give the HTTP status that caused an error, in the terms of aiohttp, botocore, httpx and gcsfs."""
    # fsspec calls every failed question "file not found".
    for cause in causes(error):
        response: object = getattr(cause, "response", None)
        if isinstance(response, dict):
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        # Only in errors of gcsfs is `code` the server's status.
        code = getattr(cause, "code", None) if type(cause).__name__ == "HttpError" else None
        for status in (response, getattr(response, "status_code", None), getattr(cause, "status", None), code):
            if isinstance(status, int) and status >= 400:
                return status
        if isinstance(cause, FileNotFoundError):
            return 404
        if _is_network(cause):
            return None
    return None


def _is_network(error: BaseException) -> bool:
    # A stream that ends early.
    return isinstance(error, EOFError) or is_network(error)


def _is_temporary(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(_is_network(cause) for cause in causes(error))


def _reason(error: BaseException) -> str:
    status = _status(error)
    if status is not None:
        return f"HTTP {status}"
    cause = next((cause for cause in causes(error) if _is_network(cause)), error)
    # The address that it was redirected to may be signed.
    text = re.sub(r"\?\S+|//[^/\s]*@", "...", str(cause))
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _explained(error: BaseException, address: str, attempts: int, failure: Failure) -> DataError:
    hint = failure.hint
    if _status(error) in (401, 403) or "Credentials" in type(error).__name__:
        hint = _CREDENTIALS.get(address.partition(":")[0].replace("https", "http"), hint)
    counted = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return DataError(f"{failure.what}: {_reason(error)}, after {counted}", where=redact(address), hint=hint)
