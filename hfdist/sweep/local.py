"""Trials as processes of this machine: started in a slot, found again by who comes after, and told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hfdist.topology import without_launcher

LOG = "log.txt"
"""In the folder of a trial: what its processes have printed."""
_MARK = "HFDIST_SWEEP_TRIAL"
"""In the environment of its processes: slot, rung and folder. It is there as soon as the process is."""


class TrialProcess:
    """The launch of a trial: its first process, in a session of its own, so that it outlives who has started it."""

    def __init__(self, process: psutil.Process, slot: int, rung: int) -> None:
        self._process, self.slot, self.rung = process, slot, rung
        self.exit_code: int | None = None
        """Below zero: the signal that has ended it; None: it runs, or another process has started it."""

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path, *, slot: int, rung: int, environment: Mapping[str, str]
    ) -> TrialProcess:
        """Start it; what it prints goes to `LOG`."""
        folder.mkdir(parents=True, exist_ok=True)
        mark = {_MARK: f"{slot} {rung} {folder.resolve()}"}
        with (folder / LOG).open("ab") as log:
            started = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**without_launcher(os.environ), **environment, **mark},
            )
        return cls(psutil.Process(started.pid), slot, rung)

    @classmethod
    def find_all(cls) -> dict[Path, TrialProcess]:
        """Give those that run on this machine, by their folders."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mark = process.environ().get(_MARK, "").split(" ", 2)
                # Its ranks have the mark, too.
                is_first = len(mark) == 3 and os.getsid(process.pid) == process.pid
                if is_first and process.status() != psutil.STATUS_ZOMBIE:
                    found[Path(mark[2])] = cls(process, int(mark[0]), int(mark[1]))
        return found

    @property
    def pid(self) -> int:
        """Of the first process, and of the session."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        try:
            # A child that nobody waits for is a zombie; one of another process is gone.
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return True
        with contextlib.suppress(psutil.Error):
            self.exit_code = self._process.wait(timeout=0)
        return True

    def stop(self) -> None:
        """Tell it to save and to stop."""
        with contextlib.suppress(psutil.Error):
            self._process.send_signal(signal.SIGTERM)
