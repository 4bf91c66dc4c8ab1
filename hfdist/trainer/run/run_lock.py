"""A run folder belongs to one run at a time, on this machine and on others that share the disk.

The system's lock on `<run.dir>/run.lock` ends with the process that holds it. Some shared disks do not pass such locks
on, so the holder also writes a beat into the file: whoever finds the beat of another machine waits whether it goes on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from hfdist.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 4 * _BEAT_SECONDS
_DYING_SECONDS = 10.0
_MOST_BYTES = 4096


class RunLock:
    """Holds a run folder until it is released or the process ends.

    Args:
        run_dir: the folder.
        beat_seconds: how often to say that the holder lives.
        silent_seconds: how long another machine's holder may be silent before its lock is taken over.
        dying_seconds: how long a holder on this machine may take to end, since a killed process lets go of its memory
            first.

    Raises:
        ConfigError: another run holds the folder.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        beat_seconds: float = _BEAT_SECONDS,
        silent_seconds: float = _SILENT_SECONDS,
        dying_seconds: float = _DYING_SECONDS,
    ) -> None:
        self._path = run_dir / LOCK
        self._beat_seconds, self._dying_seconds = beat_seconds, dying_seconds
        # Of the process, not of the opening: loader processes that outlive a killed rank must not keep it. Only this
        # one descriptor may be opened here, since closing any other would give the lock away.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(silent_seconds)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._released = threading.Event()
        self._beats = 0
        self._write()
        threading.Thread(target=self._go_on, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Let others have the folder at once."""
        self._released.set()
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _take(self, silent_seconds: float) -> None:
        deadline = time.monotonic() + self._dying_seconds
        while not self._locks():
            if time.monotonic() > deadline:
                raise _in_use(self._path, self._read())
            time.sleep(0.05)
        before = self._read()
        if before.get("host") in (None, platform.node()):
            return
        logger.warning("%s was held by %s: waiting whether it goes on", self._path, before["host"])
        deadline = time.monotonic() + silent_seconds
        while time.monotonic() < deadline:
            time.sleep(min(self._beat_seconds, silent_seconds) / 5)
            if self._read() != before:
                raise _in_use(self._path, before)

    def _locks(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(os.pread(self._descriptor, _MOST_BYTES, 0))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        content = json.dumps({"host": platform.node(), "pid": os.getpid(), "beat": self._beats}).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def _go_on(self) -> None:
        while not self._released.wait(self._beat_seconds):
            self._beats += 1
            try:
                self._write()
            except OSError as error:
                logger.warning("%s cannot be written, so another machine may take the run for dead: %s", LOCK, error)


def _in_use(path: Path, holder: dict[str, Any]) -> ConfigError:
    return ConfigError(
        "another run is using the folder",
        where="run.dir",
        found=f"{path}, held by process {holder.get('pid', '?')} on {holder.get('host', 'another machine')}",
        hint="another run.name, or wait until that run has ended",
    )
