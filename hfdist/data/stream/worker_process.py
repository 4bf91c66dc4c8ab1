"""What ties a loader process to its rank: it forwards signals, ends with the rank, and sends arrays unchanged."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from hfdist.processes.stop_signals import STOP_SIGNALS


def forward_to_rank(rank: int, each_second: Callable[[], None]) -> None:
    """Start a thread of this loader process that forwards the stop signals which others send here to the rank.

        signal of a launcher or a user  ->  sent on to the rank: this process must not end before the rank has saved
        SIGTERM of the rank             ->  this process ends
        the rank was killed             ->  this process ends about a second later

    A thread waits for signals, because it sees who has sent one, and a handler does not. Without the last rule, a
    loader process of torch may wait for ever: until somebody takes what it has read ahead, or where the rank was killed
    before torch asked whose child the process is.

    Args:
        rank: the process id of the rank, from before the fork.
        each_second: a function that the thread calls about once a second.
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
    """Return an item unchanged: arrays of numpy travel through a pipe; as tensors, each would hold a file open."""
    return item
