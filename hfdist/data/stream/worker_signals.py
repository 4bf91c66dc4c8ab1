"""Signals that reach a loader process are meant for its rank: by itself it must not end before the rank has saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def forward_to_rank(each_second: Callable[[], None]) -> None:
    """Send on what this process is sent by others; a SIGTERM of the rank itself ends it. Call it in a loader process.

    A thread waits for them, because it sees who has sent one, and handlers do not. It also ends the process some
    seconds after a rank that was killed: by itself a loader process of torch then waits for ever until what it has read
    ahead is taken.

    Args:
        each_second: called meanwhile, about so often.
    """
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)

    def wait() -> None:
        while os.getppid() == rank:
            each_second()
            received = signal.sigtimedwait(_FORWARDED, 1)
            if received is None:
                continue
            if received.si_pid == rank:
                os._exit(0)
            os.kill(rank, received.si_signo)
        os._exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()
