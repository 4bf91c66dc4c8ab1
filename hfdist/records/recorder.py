"""Writes a run's record and events while it runs."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from hfdist.atomic_write import remove_unfinished
from hfdist.errors import HfdistError, printable
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
            # A process that does one run after another has come to the end of the last one.
            last.end(0)
        # The working directory may change.
        self.run_dir = run_dir.absolute()
        remove_unfinished(RunFolder(self.run_dir).record)
        before = read_run(self.run_dir)
        if before is not None and before.state is State.running:
            # When that was, nobody knows better.
            close_record(self.run_dir, before, None, "it ended without a word", at=before.updated)
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
                close_record(self.run_dir, self.record, exit_code, error)
        RunRecorder.of_process = None

    def follow(self, folder: RunFolder) -> None:
        """Take over the record and the events of earlier starts, which another folder has, and count on from there."""
        before, own = read_run(folder.path), self.record.start
        if before is not None and before.start >= own:
            if before.state is State.running:
                close_record(folder.path, before, None, "it ended without a word", at=before.updated)
            self._count_on(before)
        events, known = RunFolder(self.run_dir).events, read_lines(folder.events)
        # What this machine alone has seen: this start, and earlier ones that the other folder does not know.
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


def close_record(
    run_dir: Path, record: RunRecord, exit_code: int | None, error: str | None, *, at: str | None = None
) -> None:
    """Write how a start has ended.

    Args:
        run_dir: the run's folder.
        record: the record of the start.
        exit_code: the exit code of its process; None: nobody knows.
        error: why, in a line of any length.
        at: when, as `utc_now` gives it; None: now.
    """
    record.state, record.exit_code, record.updated = State.of(exit_code), exit_code, at or utc_now()
    record.error = None if error is None else printable(error, LONGEST_TEXT)
    write_run(run_dir, record, is_durable=True)
    ended = {"state": record.state.value, "exit_code": exit_code, "error": record.error}
    add_event(run_dir, Event.end, start=record.start, time=record.updated, step=record.step, **ended)
