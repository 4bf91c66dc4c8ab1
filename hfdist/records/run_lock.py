"""A run folder belongs to one run at a time, on this machine and on others that share the disk.

The system's lock on `<run.dir>/run.lock` ends with the process that holds it. Some shared disks do not pass such locks
on, so the holder also writes a heartbeat into the file. A run that finds one of another machine waits to see whether it
goes on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hfdist.errors import ConfigError
from hfdist.records import RunFolder

logger = logging.getLogger(__name__)


class RunLock:
    """Holds a run folder until it is released or the process ends.

    Args:
        run_dir: the run's folder.
        beat_seconds: seconds between two heartbeats of the holder.
        silent_seconds: seconds without a heartbeat, after which the lock of another machine is taken over.
        dying_seconds: seconds that a holder on this machine may take to end: a killed process frees its memory first.

    Raises:
        ConfigError: another run holds the folder.
        OSError: the file cannot be written.
    """

    _JOIN_SECONDS = 10.0
    """How long `release` waits for a beat that hangs, as on a network disk that is gone."""

    def __init__(
        self, run_dir: Path, *, beat_seconds: float = 5.0, silent_seconds: float = 20.0, dying_seconds: float = 10.0
    ) -> None:
        self._path = RunFolder(run_dir).lock
        # The lock (`lockf`) is the process's, and not the open file's: loader processes that outlive a killed rank must
        # not keep it. So no other descriptor of the file may be opened here: to close that would give the lock away.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(beat_seconds, silent_seconds, dying_seconds)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._released = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, args=[beat_seconds], name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others have the folder at once."""
        self._released.set()
        # A beat under way would be written into whatever file gets the number of this one next.
        self._thread.join(self._JOIN_SECONDS)
        if not self._thread.is_alive():
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)

    def _take(self, beat_seconds: float, silent_seconds: float, dying_seconds: float) -> None:
        deadline = time.monotonic() + dying_seconds
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise self._in_use(self._read()) from None
            time.sleep(0.05)
        before = self._read()
        if before.get("host") in (None, platform.node()):
            return
        logger.warning("%s was held by %s: waiting whether it goes on", self._path, before["host"])
        deadline = time.monotonic() + silent_seconds
        while time.monotonic() < deadline:
            time.sleep(min(beat_seconds, silent_seconds) / 5)
            if self._read() != before:
                raise self._in_use(before)

    def _in_use(self, holder: Mapping[str, object]) -> ConfigError:
        held_by = f"process {holder.get('pid', '?')} on {holder.get('host', 'another machine')}"
        found, hint = f"{self._path}, held by {held_by}", "another run.name, or wait until that run has ended"
        return ConfigError("another run is using the folder", where="run.dir", found=found, hint=hint)

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, beat: int) -> None:
        content = json.dumps({"host": platform.node(), "pid": os.getpid(), "beat": beat}).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def _beat(self, beat_seconds: float) -> None:
        beat = 0
        while not self._released.wait(beat_seconds):
            beat += 1
            try:
                self._write(beat)
            except OSError as error:
                logger.warning("run.lock cannot be written, so another machine may take the run for dead: %s", error)
