"""What has failed: a full disk or a network, and when another try is worth it; the signal that ended a process."""

from __future__ import annotations

import errno
import signal
from contextlib import suppress
from random import SystemRandom

# EFBIG: a limit of the process, or of the file system, for the size of one file.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
# By name, since these libraries need not be installed: aiohttp, botocore, httpx.
_NETWORK_ERRORS = {"ClientError", "HTTPClientError", "TransportError"}


def causes(error: BaseException) -> list[BaseException]:
    """Give the error and its causes, the first cause first: libraries wrap what went wrong several times."""
    chain = [error]
    while True:
        cause = chain[0].__cause__ or (None if chain[0].__suppress_context__ else chain[0].__context__)
        if cause is None or cause in chain:
            return chain
        chain.insert(0, cause)


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk, a quota or the limit of a file's size takes no more."""
    return isinstance(error, OSError) and error.errno in _FULL_DISK


def is_network(error: BaseException) -> bool:
    """Whether it is about a connection, and not about what came through one."""
    if isinstance(error, (ConnectionError, TimeoutError)) or (isinstance(error, OSError) and error.errno in _NETWORK):
        return True
    return any(kind.__name__ in _NETWORK_ERRORS for kind in type(error).__mro__)


def seconds_before_retry(attempt: int, first_seconds: float) -> float:
    """Give how long to wait after this attempt, from 1: doubles each time, give or take a half."""
    # The system's generator: the seeded one belongs to the training.
    return first_seconds * 2 ** (attempt - 1) * SystemRandom().uniform(0.5, 1.5)


def signal_name(number: int) -> str:
    """Give the name of a signal, SIGKILL; most real-time signals have none: signal 40."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
