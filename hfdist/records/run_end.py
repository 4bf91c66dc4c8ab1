"""How a run ends, in its record: written by the process that ends, or by one that has seen another end."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hfdist.errors import INTERRUPTED, HfdistError, named_line
from hfdist.failures import signal_name
from hfdist.records.recorder import RunRecorder, close_record
from hfdist.records.run_file import RunRecord, State, read_run

_SIGNALLED = 128
"""Exit code of a process that a signal has ended, as shells have it, without the signal's number."""


def record_end(exit_code: int, error: str | None = None) -> None:
    """Write how this process ends into the record of its run, if it has one."""
    recorder = RunRecorder.of_process
    if recorder is not None:
        recorder.end(exit_code, error)


def end_by_signal(number: int) -> None:
    """Write that a signal ends this process, before it does."""
    record_end(_SIGNALLED + number, f"ended by {signal_name(number)}")


def record_end_of_peer(run_dir: Path, start: int, exit_code: int, error: str | None) -> None:
    """Write how a start ends whose rank 0 is another process, unless it has said so or another start runs."""
    record = read_run(run_dir)
    if record is not None and record.start == start and record.state is State.running:
        with suppress(HfdistError, OSError):
            close_record(run_dir, record, exit_code, error)


def record_end_of_run(run_dir: Path, start: int, exit_code: int, error: str | None) -> None:
    """Write how a start ends, on any of its ranks."""
    if RunRecorder.of_process is not None:
        record_end(exit_code, error)
    else:
        record_end_of_peer(run_dir, start, exit_code, error)


@contextmanager
def recording_end() -> Iterator[None]:
    """Write how the block ends into the record of the run that it begins, if it begins one."""
    try:
        yield
    except BaseException as error:
        record_end(*_describe(error))
        raise
    record_end(0)


def record_ranks(run_dir: Path, do_run: Callable[[], int]) -> int:
    """Call `do_run`, which does a run in other processes, and return its exit code.

    The record is corrected if their rank 0 has written another end, or none: it may have been killed, or have met only
    what followed from the end of another rank.
    """
    before = read_run(run_dir)
    try:
        exit_code = do_run()
    except HfdistError as error:
        _correct(run_dir, before, *_describe(error))
        raise
    _correct(run_dir, before, exit_code, _error_of(exit_code))
    return exit_code


def _correct(run_dir: Path, before: RunRecord | None, exit_code: int, error: str | None) -> None:
    """Write the end of the start that began since `before` on this machine, if its record says another."""
    record = read_run(run_dir)
    is_new = record is not None and (before is None or record.start > before.start)
    if record is None or not is_new or (record.host, record.launcher_pid) != (platform.node(), os.getpid()):
        return
    if record.exit_code != exit_code:
        with suppress(HfdistError, OSError):
            close_record(run_dir, record, exit_code, error)


def _error_of(exit_code: int) -> str | None:
    """Say what an exit code means; None: no error."""
    if exit_code == 0:
        return None
    if exit_code - _SIGNALLED in signal.valid_signals():
        return f"ended by {signal_name(exit_code - _SIGNALLED)}"
    return f"a rank has ended with exit code {exit_code}"


def _describe(error: BaseException) -> tuple[int, str | None]:
    """Give the exit code of a process that an error ends, and one line."""
    if isinstance(error, HfdistError):
        return error.exit_code, f"{error.what}: {error.where}" if error.where else error.what
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code, _error_of(error.code)
        # None, or a text that Python prints in place of a code.
        return (0, None) if error.code is None else (1, str(error.code))
    return 1, named_line(error)
