"""Errors of hfdist's that a user's own program does not catch: one message of one rank, as from a recipe."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

from hfdist.errors import HfdistError

_reports = False


def report_uncaught() -> None:
    """From now on, let an `HfdistError` that is not caught end the process by its message and its exit code.

    Other errors go where they would have gone. A session at a prompt keeps its tracebacks: it does not end. Notebooks
    and test runners catch all errors before this.
    """
    global _reports
    if _reports or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    _reports, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HfdistError):
            before(kind, error, trace)
            return
        # Only now: it loads Hydra, and a program that does not fail needs none.
        from hfdist.config.cli.command import stop_here

        # torch hangs a hook of its own before this one, which collects what is written in order to name the rank.
        with contextlib.redirect_stderr(sys.__stderr__):
            stop_here(error)

    sys.excepthook = hook
