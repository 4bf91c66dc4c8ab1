"""Writes a run's record and events while it runs; and what is left to write once a process of it has ended."""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from hfdist.atomic_write import remove_unfinished
from hfdist.errors import INTERRUPTED, HfdistError, first_line, printable
from hfdist.failures import signal_name
from hfdist.records.events import Event, add_event, utc_now
from hfdist.records.lines import read_lines, write_lines
from hfdist.records.run_file import SUMMED, RunRecord, State, read_run, write_run
from hfdist.records.run_folder import RunFolder
from hfdist.records.versions import find_versions

logger = logging.getLogger(__name__)

LONGEST_TEXT = 500
"""Characters of an error, or of another text of unknown origin."""
_WRITE_SECONDS = 1.0
"""Least time between two writes of run.json for steps alone."""
_SIGNALLED = 128
"""Exit code of a process that a signal has ended, as shells have it, without the signal's number."""


class RunRecorder:
    """Keeps `run.json` and `events.jsonl` of one start; on rank 0, once it holds the folder's lock.

    Args:
        run_dir: the run's folder.
        layout: degree of each axis, and `sharding`.
        processes: number of ranks.

    Raises:
        ResourceError: the disk is full.
    """

    of_process: ClassVar[RunRecorder | None] = None
    """The recorder of the run that this process does, so that whatever ends the process can say so."""

    def __init__(self, run_dir: Path, layout: Mapping[str, object], processes: int) -> None:
        if (last := RunRecorder.of_process) is not None:
            # A process that does one run after the other has come back from the last.
            last.end(0)
        # The working directory may change.
        self.run_dir = run_dir.absolute()
        remove_unfinished(RunFolder(self.run_dir).record)
        before = read_run(self.run_dir)
        if before is not None and before.state is State.running:
            # When that was, nobody knows better.
            _close(self.run_dir, before, None, "it ended without a word", at=before.updated)
        self.record = RunRecord(
            start=1,
            started=utc_now(),
            host=platform.node(),
            pid=os.getpid(),
            launcher_pid=os.getppid(),
            processes=processes,
            layout=dict(layout),
            versions=find_versions(),
        )
        if before is not None:
            self._count_on(before)
        self._begun_seconds = self._written_seconds = time.monotonic()
        # The watch may end the run from a thread of its own, and a signal in the middle of a write.
        self._lock = threading.RLock()
        self._has_warned = False
        RunRecorder.of_process = self
        self.write(is_durable=True)
        self.add(Event.start, layout=self.record.layout, host=self.record.host)

    def add(self, event: Event, **fields: object) -> None:
        """Add an event."""
        add_event(self.run_dir, event, start=self.record.start, **fields)

    def write(self, *, is_durable: bool = False) -> None:
        """Write `run.json` as the record is now, unless the run has ended."""
        with self._lock:
            if self.record.state is State.running:
                self._count_seconds()
                self.record.updated = utc_now()
                write_run(self.run_dir, self.record, is_durable=is_durable)

    def step_done(self, step: int) -> None:
        """Note the step, and write `run.json` at most once a second.

        Training goes on if that fails: only the first failure is logged.
        """
        self.record.step = step
        if time.monotonic() - self._written_seconds > _WRITE_SECONDS:
            try:
                self.write()
            except HfdistError as error:
                if not self._has_warned:
                    logger.warning("run.json is not up to date: %s", error)
                self._has_warned = True

    def end(self, exit_code: int, error: str | None = None) -> None:
        """Write how this process ends, once. Nothing can be done about a full disk any more."""
        with self._lock, suppress(HfdistError, OSError):
            if self.record.state is State.running:
                self._count_seconds()
                _close(self.run_dir, self.record, exit_code, error)
        RunRecorder.of_process = None

    def follow(self, folder: RunFolder) -> None:
        """Take over the record and the events of earlier starts, which another folder has, and count on from there."""
        before, own = read_run(folder.path), self.record.start
        if before is not None and before.start >= own:
            if before.state is State.running:
                _close(folder.path, before, None, "it ended without a word", at=before.updated)
            self._count_on(before)
        events, known = RunFolder(self.run_dir).events, read_lines(folder.events)
        # Of a start on this machine: this one, and those that the other folder does not know.
        new = [line for line in read_lines(events) if line not in known]
        for line in new:
            if line.get("start") == own:
                line["start"] = self.record.start
        write_lines(events, [*known, *new])
        self.write(is_durable=True)

    def _count_on(self, before: RunRecord) -> None:
        self.record.start = before.start + 1
        for name in ("seconds", *SUMMED):
            setattr(self.record, f"earlier_{name}", before.total(name))

    @property
    def seconds(self) -> float:
        """Seconds since this start opened its folder."""
        return time.monotonic() - self._begun_seconds

    def _count_seconds(self) -> None:
        self._written_seconds = time.monotonic()
        self.record.seconds = round(self.seconds, 3)


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
            _close(run_dir, record, exit_code, error)


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
            _close(run_dir, record, exit_code, error)


def _error_of(exit_code: int) -> str | None:
    """Say what an exit code means; None: no error."""
    if exit_code == 0:
        return None
    if exit_code - _SIGNALLED in signal.valid_signals():
        return f"ended by {signal_name(exit_code - _SIGNALLED)}"
    return f"a rank has ended with exit code {exit_code}"


def _close(
    run_dir: Path, record: RunRecord, exit_code: int | None, error: str | None, *, at: str | None = None
) -> None:
    record.state, record.exit_code, record.updated = State.of(exit_code), exit_code, at or utc_now()
    record.error = None if error is None else printable(error, LONGEST_TEXT)
    write_run(run_dir, record, is_durable=True)
    ended = {"state": record.state.value, "exit_code": exit_code, "error": record.error}
    add_event(run_dir, Event.end, start=record.start, time=record.updated, step=record.step, **ended)


def _describe(error: BaseException) -> tuple[int, str | None]:
    """Give the exit code of a process that an error ends, and one line."""
    if isinstance(error, HfdistError):
        return error.exit_code, f"{error.what}: {error.where}" if error.where else error.what
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code, _error_of(error.code)
        # None, or what Python prints in place of a code.
        return (0, None) if error.code is None else (1, str(error.code))
    return 1, f"{type(error).__name__}: {first_line(error)}"
