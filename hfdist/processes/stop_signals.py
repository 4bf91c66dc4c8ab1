"""The signals that ask a run to save and stop."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals of a launcher or a scheduler, of Ctrl-C, of a scheduler's warning, and of a terminal that closes."""


def heard_signals() -> list[signal.Signals]:
    """Give those of `STOP_SIGNALS` that may have a handler: under nohup a run outlives its terminal."""
    is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number is not signal.SIGHUP or not is_under_nohup]


def leave_closed_terminal() -> None:
    """Replace standard output and error by /dev/null where their terminal has closed: else each write is an error."""
    for descriptor in (1, 2):
        # OSError: a process may have been started without it.
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
