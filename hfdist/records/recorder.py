"""Writes a run's record and events while it runs; and what is left to write once a process of it has ended."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from hfdist.errors import INTERRUPTED, HfdistError, first_line, printable
from hfdist.records.events import Event, add_event, now
from hfdist.records.run_file import RunRecord, State, read_run, write_run

PACKAGES = ("hfdist", "transformers", "torch", "accelerate", "deepspeed", "datasets", "tokenizers", "safetensors")
_LONGEST_ERROR = 500
_WRITE_SECONDS = 1.0
"""Between two writes of run.json for steps alone."""


class RunRecorder:
    """Keeps `run.json` and `events.jsonl` of one start; on rank 0, once it holds the folder's lock.

    Args:
        run_dir: the folder.
        layout: degree of each axis, and `sharding`.
        processes: number of ranks.

    Raises:
        ResourceError: the disk is full.
    """

    of_process: ClassVar[RunRecorder | None] = None
    """The one whose run this process does, so that whatever ends the process can say so."""

    def __init__(self, run_dir: Path, layout: Mapping[str, Any], processes: int) -> None:
        self.run_dir = run_dir
        before = read_run(run_dir)
        if before is not None and before.state is State.running:
            _close(run_dir, before, None, "it ended without a word")
        self.record = RunRecord(
            start=1 if before is None else before.start + 1,
            step=0 if before is None else before.step,
            tokens=0 if before is None else before.tokens,
            earlier_seconds=0.0 if before is None else before.earlier_seconds + before.seconds,
            started=now(),
            host=platform.node(),
            pid=os.getpid(),
            launcher_pid=os.getppid(),
            processes=processes,
            layout=dict(layout),
            versions=find_versions(),
        )
        self._begun_seconds = self._written_seconds = time.monotonic()
        # The watch may end the run from a thread of its own.
        self._lock = threading.Lock()
        RunRecorder.of_process = self
        self.write()
        self.add(Event.start, layout=self.record.layout, host=self.record.host)

    def add(self, event: Event, **fields: object) -> None:
        """Add an event."""
        add_event(self.run_dir, event, start=self.record.start, **fields)

    def write(self) -> None:
        """Write `run.json` as the record is now."""
        with self._lock:
            if self.record.state is State.running:
                self._written_seconds = time.monotonic()
                self._count_seconds()
                self.record.updated = now()
                write_run(self.run_dir, self.record)

    def step_done(self, step: int) -> None:
        """Note the step; now and then, write it."""
        self.record.step = step
        if time.monotonic() - self._written_seconds > _WRITE_SECONDS:
            self.write()

    def end(self, exit_code: int, error: str | None = None) -> None:
        """Write how this process ends. Nothing can be done about a full disk any more."""
        RunRecorder.of_process = None
        with self._lock, suppress(HfdistError, OSError):
            self._count_seconds()
            _close(self.run_dir, self.record, exit_code, error)

    def _count_seconds(self) -> None:
        self.record.seconds = round(time.monotonic() - self._begun_seconds, 3)


def end_run(run_dir: Path, exit_code: int, error: str | None = None, *, launcher_pid: int | None = None) -> None:
    """Write how a run has ended, unless that is known: for those that see it end before rank 0 can say so.

    Args:
        run_dir: the folder; one without `run.json` stays as it is.
        exit_code: of the run.
        error: one line.
        launcher_pid: only if this process has started rank 0.
    """
    own = RunRecorder.of_process
    if own is not None and own.run_dir == run_dir:
        own.end(exit_code, error)
        return
    record = read_run(run_dir)
    is_open = record is not None and record.state is State.running
    if record is None or not is_open or launcher_pid not in (None, record.launcher_pid):
        return
    with suppress(HfdistError, OSError):
        _close(run_dir, record, exit_code, error)


def _close(run_dir: Path, record: RunRecord, exit_code: int | None, error: str | None) -> None:
    record.state, record.exit_code, record.updated = State.of(exit_code), exit_code, now()
    record.error = None if error is None else printable(error, _LONGEST_ERROR)
    write_run(run_dir, record)
    ended = {"state": record.state.value, "exit_code": exit_code, "error": record.error}
    add_event(run_dir, Event.end, start=record.start, step=record.step, **ended)


@contextmanager
def recording_end() -> Iterator[None]:
    """Write how the block ends into the record of the run that it began, if it began one."""
    exit_code, said = 0, None
    try:
        yield
    except BaseException as error:
        exit_code, said = _describe(error)
        raise
    finally:
        if RunRecorder.of_process is not None:
            RunRecorder.of_process.end(exit_code, said)


def _describe(error: BaseException) -> tuple[int, str | None]:
    """Give the exit code of a process that an error ends, and one line."""
    if isinstance(error, HfdistError):
        return error.exit_code, f"{error.what}: {error.where}" if error.where else error.what
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        return (error.code, None) if isinstance(error.code, int) else (int(error.code is not None), None)
    return 1, f"{type(error).__name__}: {first_line(error)}"


def find_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Give the versions of Python and of packages."""
    versions = {"Python": platform.python_version()}
    for package in packages:
        # A checkout that is not installed has none.
        versions[package] = "of an unknown version"
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
