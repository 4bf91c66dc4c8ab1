"""What a loader process does besides reading: it forwards signals to its rank, and gives arrays as they are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from hfdist.processes.stop_signals import STOP_SIGNALS


def forward_to_rank(rank: int, each_second: Callable[[], None]) -> None:
    """Forward the signals that others send to this loader process to its rank; a SIGTERM of the rank ends the process.

    The process must not end by a signal before the rank has saved. A thread waits for signals, because it sees who has
    sent one, and handlers do not. It also ends the process some seconds after a rank that was killed: otherwise a
    loader process of torch waits for ever until what it has read ahead is taken, or if the rank was killed before torch
    asked whose child the process is.

    Args:
        rank: the process id of the rank, from before the fork.
        each_second: is called about once a second.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def wait() -> None:
        while os.getppid() == rank:
            each_second()
            received = signal.sigtimedwait(STOP_SIGNALS, 1)
            if received is None:
                continue
            if received.si_pid == rank:
                os._exit(0)
            os.kill(rank, received.si_signo)
        os._exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def keep_arrays(item: object) -> object:
    """Collate nothing: numpy arrays travel through a pipe as they are; tensors would each hold a file open."""
    return item
