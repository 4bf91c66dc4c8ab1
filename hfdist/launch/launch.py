"""Starts the processes of a run on this machine, through torch's elastic agent, and ends with what they end with."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hfdist.errors import BudgetError, CheckpointError, ConfigError, DataError, NumericsError, PeerError, PreemptedError
from hfdist.failures import signal_name
from hfdist.host_cores import usable_cores
from hfdist.processes.child_python import restore_path, safe_path
from hfdist.processes.stop_signals import heard_signals

_STAYS = (0, *(kind.exit_code for kind in (ConfigError, DataError, CheckpointError, NumericsError, BudgetError)))
"""Exit codes after which another start does not help."""
START_METHOD = "spawn"
_POLL_SECONDS = 0.05
_MOST_POLLS = 20
"""How often a signal waits for processes that are being started when it comes."""


class _ToldToStop(BaseException):  # no error
    """Raised when this process was told to stop and the others have ended."""


def start_ranks(main: Callable[..., None], *arguments: object, processes: int, max_restarts: int) -> int:
    """Call `main(*arguments)` in so many new processes, each with a rank, and wait for their end.

    A signal to this process that asks to stop is passed on, and then the processes may take the time that a save takes.
    Without one, all are started again after a failure that may pass.

    Args:
        main: a function of a module, which says by itself what went wrong, and ends by `sys.exit`.
        arguments: picklable.
        processes: number of processes.
        max_restarts: how often they are started again.

    Returns:
        The exit code of the process that failed first, or 0.

    Raises:
        ConfigError: there are fewer GPUs.
        PeerError: that process was killed.
    """
    gpus = count_gpus()
    if 0 < gpus < processes:
        raise ConfigError(
            "each process needs a GPU of its own",
            where="launch.processes",
            found=f"{processes}, with {gpus} GPU{'s' if gpus > 1 else ''} (CUDA_VISIBLE_DEVICES= trains on the CPU)",
            hint="launch.processes=auto",
        )
    _silence_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    for starts_left in reversed(range(max_restarts + 1)):
        # What a signal's handler raises is lost where Python ignores errors, as in a finalizer: so it is noted as well.
        told: list[int] = []
        with contextlib.suppress(_ToldToStop), _passing_signals_on(told, processes) as delayed:
            exit_code = _start_once(main, arguments, processes)
        if told:
            return told[-1]
        if not starts_left or delayed or exit_code in _STAYS:
            break
        sys.stderr.write(f"starting all {processes} processes again; {starts_left - 1} more restarts are left\n")
    if exit_code < 0:
        raise PeerError(
            f"a process was ended by {signal_name(-exit_code)}, and with it the run",
            where="launch.processes",
            hint="the same command goes on from the last checkpoint; `dmesg` tells whether memory ran out",
        )
    return exit_code


def count_gpus() -> int:
    """Give the number of GPUs that this process may use."""
    return torch.cuda.device_count()


def _start_once(main: Callable[..., None], arguments: tuple[object, ...], processes: int) -> int:
    """Start them, and give the exit code; below zero: the signal that has killed one."""
    with tempfile.TemporaryDirectory(prefix="hfdist-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # its full name may lead nowhere
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            start_method=START_METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="",  # its handlers would take the place of ours
        )
        try:
            with safe_path() as before:
                elastic_launch(config, _run_rank)(main, arguments, before)
        except ChildFailedError as error:
            return int(error.get_first_failure()[1].exitcode)
    return 0


def _run_rank(main: Callable[..., None], arguments: tuple[object, ...], path_before: str | None) -> None:
    restore_path(path_before)
    try:
        main(*arguments)
    except SystemExit as ended:
        # The agent would wait for ever: None is no 0 to it.
        sys.exit(ended.code or 0)
    except Exception:
        # The agent would keep it to itself.
        traceback.print_exc()
        sys.exit(1)


@contextlib.contextmanager
def _passing_signals_on(told: list[int], processes: int) -> Iterator[list[threading.Timer]]:
    """Pass signals on to the processes while the context is open.

    Args:
        told: gets the run's exit code, once a signal has come and all processes have ended.
        processes: number of the processes that are to be told.

    Yields:
        A list; it is not empty once a signal has come before all processes had started.
    """
    delayed: list[threading.Timer] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if len(multiprocessing.active_children()) < processes and len(delayed) < _MOST_POLLS:
            # A process that is not known yet would never be told.
            delayed.append(threading.Timer(_POLL_SECONDS, os.kill, (os.getpid(), number)))
            delayed[-1].start()
            return
        told.append(_pass_on(number))
        raise _ToldToStop

    before = {number: signal.signal(number, pass_on) for number in heard_signals()}
    try:
        yield delayed
    finally:
        for timer in delayed:
            timer.cancel()
            timer.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int) -> int:
    """Tell all processes, wait for their end, as the agent would not for long, and give the run's exit code."""
    ranks = multiprocessing.active_children()
    for rank in ranks:
        assert rank.pid is not None
        with contextlib.suppress(ProcessLookupError):  # the agent has seen its end this moment
            os.kill(rank.pid, number)
    for rank in ranks:
        rank.join()
    codes = {rank.exitcode or 0 for rank in ranks}
    if PreemptedError.exit_code in codes:
        return PreemptedError.exit_code
    # Below zero: they did not listen yet or any more, or were told twice.
    return 128 + number if not codes or min(codes) < 0 else max(codes)


def _silence_agent() -> None:
    """Let torch say nothing from now on: what went wrong, the process that failed has said."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
