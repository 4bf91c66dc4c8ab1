"""How a process ends: an error becomes one message and an exit code; a rank skips the interpreter's own shutdown.

While the interpreter ends, threads in torch's C++ go on. One that comes back to Python then, as gloo's do to let go of
a tensor, aborts a process whose run ended well ("terminate called without an active exception", Python 3.11 to 3.13),
and taking a group down may wait for a peer. No call of torch ends them in bounded time, so they end with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from types import TracebackType
from typing import NoReturn

from hfdist.errors import (
    INTERRUPTED,
    BudgetError,
    ConfigError,
    HfdistError,
    NumericsError,
    PartitionError,
    PreemptedError,
)
from hfdist.topology import read_launcher

RANK_0_PRINTS_SECONDS = 5.0
"""How long the other ranks wait: a launcher ends all processes as soon as one has failed."""
_FAILED_SECONDS = 5.0
"""Most seconds for the exit functions of a rank that has failed: the others wait for it in a collective."""
_LAST = -1000
"""Exit priority after all of multiprocessing's own finalizers: the one that removes its temporary folder has -100."""
_AGREED = (BudgetError, PreemptedError)
"""Ends that all ranks have agreed upon: rank 0 says them for certain."""
_reports = False


@contextlib.contextmanager
def told_in_one_message(stop: Callable[[HfdistError], NoReturn]) -> Iterator[None]:
    """End the process by `stop` after an error of the block, and quietly where it is interrupted."""
    try:
        yield
    except HfdistError as error:
        stop(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def tolerating_broken_pipe(cut_off: int = 0) -> Iterator[None]:
    """Let the block print; end quietly where nobody reads standard output any more, as of `hfdist plan ... | head`.

    Args:
        cut_off: the exit code where the block ends for this before it is done; 0: it only prints.
    """
    if sys.stdout is None:
        # The shell has closed it (`>&-`).
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        yield
    except BrokenPipeError:
        out = select.poll()
        out.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in out.poll(0)):
            # Another pipe or connection is broken, and not standard output.
            raise
        _print_nowhere()
        if cut_off != 0:
            sys.exit(cut_off)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _print_nowhere()


def print_at_once(line: str) -> None:
    """Print a line of work that goes on whether or not anybody reads it."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _print_nowhere()


def _print_nowhere() -> None:
    """Lead standard output to nowhere: Python would try to write the rest when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop_everywhere(error: HfdistError) -> NoReturn:
    """End after an error that every rank meets alike: one message, from rank 0."""
    if _rank() == 0:
        _say(str(error))
    else:
        time.sleep(RANK_0_PRINTS_SECONDS)
    sys.exit(error.exit_code)


def stop_here(error: HfdistError) -> NoReturn:
    """End after an error of a run that has begun.

    All ranks most likely meet a mistake in the config or the model, and any error before there is a process group. Then
    rank 0 says it; the others wait, and speak only if no launcher has ended them meanwhile. Of other errors the other
    ranks may know nothing, and wait for this one in a collective: it ends at once.
    """
    rank = _rank()
    is_met_by_all = group_size() <= 1 or isinstance(error, (ConfigError, PartitionError, NumericsError, *_AGREED))
    if rank != 0 and is_met_by_all:
        time.sleep(RANK_0_PRINTS_SECONDS)
    if rank == 0 or not isinstance(error, _AGREED):
        _say(str(error) if rank == 0 and is_met_by_all else f"[rank {rank}] {error}")
    sys.exit(error.exit_code)


def _rank() -> int:
    try:
        return read_launcher().rank
    except ConfigError:
        return 0


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def report_uncaught() -> None:
    """Let an `HfdistError` that a user's own program does not catch end the process as a recipe ends, from now on.

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
        # torch hangs a hook of its own before this one, which collects what is written in order to name the rank.
        with contextlib.redirect_stderr(sys.__stderr__):
            stop_here(error)

    sys.excepthook = hook


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """End the process after the block where a process group is up by then, with the exit code that Python would give.

    Without a group the block is left as it would be.
    """
    try:
        yield
        exit_code = 0
    except BaseException as error:
        if group_size() == 0:
            raise
        exit_code = _report(error)
    if group_size() == 0:
        return
    if exit_code == 0 and multiprocessing.parent_process() is not None:
        # Whoever has started this process waits for what the function returns.
        Finalize(None, _end, args=(exit_code,), exitpriority=_LAST)
    else:
        _end(exit_code)


def group_size() -> int:
    """Give the number of processes of the group that is up; 0 without one. Without torch there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_world_size())


def _report(error: BaseException) -> int:
    """Say what the interpreter says of an error that nobody has caught, and give its exit code."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _end(exit_code: int) -> NoReturn:
    if exit_code != 0:
        limit = threading.Timer(_FAILED_SECONDS, os._exit, [exit_code])
        limit.daemon = True
        limit.start()
    try:
        # Both private, and what the interpreter's end begins with: it waits for threads that are no daemons, and runs
        # atexit's functions.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(exit_code)
