"""The end of a rank's process: all that Python does at its end, and then at once, past the interpreter's own.

While the interpreter ends, threads in torch's C++ go on. One that comes back to Python then, as gloo's do to let go of
a tensor, aborts a process whose run ended well ("terminate called without an active exception", Python 3.11 to 3.13),
and taking a group down may wait for a peer. No call of torch ends them in bounded time, so they end with the process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any, NoReturn

_FAILED_SECONDS = 5.0
"""For what is left to do at the end of a rank that has failed: the others wait for it in a collective."""
_LAST = -1000
"""Priority behind all of multiprocessing's own finalizers: the one that removes its temporary folder has -100."""


@contextmanager
def ending() -> Iterator[None]:
    """End the process behind the block where a process group is up by then, with the exit code that Python would give.

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
    """Processes of the group that is up; 0 without one. Never imports torch: without it there is no group."""
    distributed: Any = sys.modules.get("torch.distributed")
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
