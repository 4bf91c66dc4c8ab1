"""Trying again what a network may have broken, for a bounded time."""

from __future__ import annotations

import errno
import itertools
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, TypeVar

from hfdist.config.checks.urls import redact
from hfdist.errors import DataError, HfdistError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Of libraries that need not be installed: aiohttp, botocore, httpx.
_NETWORK_ERRORS = {"ClientError", "HTTPClientError", "TransportError"}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NETWORK_ERRNOS = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for a public bucket",
    "hf": "set HF_TOKEN, and accept the dataset's terms on its page",
    "http": "credentials for the host in ~/.netrc",
}


@dataclass(frozen=True)
class Retries:
    """How often, and for how long in all, an answer is asked for again."""

    attempts: int = 6
    first_wait_seconds: float = 1.0
    """Doubles each time, give or take a half."""
    total_seconds: float = 60.0
    """No attempt starts later than this after the first."""

    def run(self, action: Callable[[], T], address: str) -> T:
        """Give what `action` gives, or raises on purpose.

        Raises:
            DataError: no answer after the last attempt, or one that trying again does not change (403, 404).
            OSError: a full disk.
        """
        started = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return action()
            except HfdistError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
                # The system's generator: the seeded one belongs to the training.
                wait_seconds = self.first_wait_seconds * 2 ** (attempt - 1) * SystemRandom().uniform(0.5, 1.5)
                late = time.monotonic() - started + wait_seconds > self.total_seconds
                if not _is_temporary(error) or attempt == self.attempts or late:
                    raise _explained(error, address, attempt) from error
                reason = _reason(error)
            logger.warning(
                "%s: %s; attempt %d of %d in %.1f s", redact(address), reason, attempt + 1, self.attempts, wait_seconds
            )
            time.sleep(wait_seconds)
        raise AssertionError("the loop ends by return or raise")


def _chain(error: BaseException) -> list[BaseException]:
    """Give the error and its causes, the first cause first: fsspec calls every failed question "file not found"."""
    chain = [error]
    while chain[0].__cause__ is not None:
        chain.insert(0, chain[0].__cause__)
    return chain


def _status(error: BaseException) -> int | None:
    """Give the HTTP status behind an error, in the terms of aiohttp, botocore, httpx and gcsfs."""
    for cause in _chain(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for status in (
            response,
            getattr(response, "status_code", None),
            getattr(cause, "status", None),
            # Elsewhere, such as in aiohttp, a code is not the server's.
            getattr(cause, "code", None) if type(cause).__name__ == "HttpError" else None,
        ):
            if isinstance(status, int) and status >= 400:
                return status
        if isinstance(cause, FileNotFoundError):
            return 404
        if _is_network(cause):
            return None
    return None


def _is_network(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, EOFError)):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS:
        return True
    return any(kind.__name__ in _NETWORK_ERRORS for kind in type(error).__mro__)


def _is_temporary(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(_is_network(cause) for cause in _chain(error))


def _reason(error: BaseException) -> str:
    status = _status(error)
    if status is not None:
        return f"HTTP {status}"
    cause = next((cause for cause in _chain(error) if _is_network(cause)), error)
    # The address that it was redirected to may be signed.
    text = re.sub(r"\?\S+|//[^/\s]*@", "...", str(cause))
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _explained(error: BaseException, address: str, attempts: int) -> DataError:
    hint = "check the address and the network, then start again: files that are already here are kept"
    if _status(error) in (401, 403) or "Credentials" in type(error).__name__:
        hint = _CREDENTIALS.get(address.partition(":")[0].replace("https", "http"), hint)
    counted = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return DataError(f"cannot be read: {_reason(error)}, after {counted}", where=redact(address), hint=hint)
