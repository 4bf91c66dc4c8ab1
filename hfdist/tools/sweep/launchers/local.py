"""Trials as processes of this machine: started in a slot, found by a later process of the sweep, and told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hfdist.host_cores import usable_cores
from hfdist.tools.sweep.launchers.base import LOG, LaunchedTrial, TrialMark, read_mark
from hfdist.topology import without_launcher

_MARK = "HFDIST_SWEEP_TRIAL"
"""Variable in the environment of a trial's processes: a TrialMark. It is there as soon as the process is."""


class TrialProcess:
    """The launch of a trial: its first process, in a session of its own, so that it outlives who has started it."""

    def __init__(self, process: psutil.Process, slot: int, rung: int) -> None:
        self._process, self.slot, self.rung = process, slot, rung
        self.exit_code: int | None = None
        """See `LaunchedTrial`; that of a trial which another process has started is not known."""

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path, *, slot: int, rung: int, environment: Mapping[str, str]
    ) -> TrialProcess:
        """Start it; what it prints goes to `LOG`."""
        mark = {_MARK: str(TrialMark(slot, rung, folder))}
        with (folder / LOG).open("ab") as log:
            # The object is kept: Python itself waits for children that nothing refers to, and drops their exit codes.
            started = psutil.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**without_launcher(os.environ), **environment, **mark},
            )
        return cls(started, slot, rung)

    @classmethod
    def find_all(cls) -> dict[Path, LaunchedTrial]:
        """Give those that run on this machine, by their folders."""
        found: dict[Path, LaunchedTrial] = {}
        # A trial comes before the processes that it has started in sessions of their own, such as a tracker's service.
        for process in sorted(psutil.process_iter(["create_time"]), key=lambda one: one.info["create_time"] or 0.0):
            with contextlib.suppress(psutil.Error, OSError):
                mark = read_mark(process.environ().get(_MARK, ""))
                # The ranks of a trial have its mark, too.
                is_first = mark is not None and os.getsid(process.pid) == process.pid
                if mark is not None and is_first and process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(mark.folder, cls(process, mark.slot, mark.rung))
        return found

    @property
    def pid(self) -> int:
        """Process id of the first process; it is the id of the session, too."""
        return self._process.pid

    def poll(self) -> bool:
        """Look whether it does not run any more."""
        try:
            # A child that nobody waits for is a zombie; one of another process is gone.
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return True
        with contextlib.suppress(psutil.Error):
            self.exit_code = self._process.wait(timeout=0)
        return True

    def stop(self, *, can_save: bool) -> None:
        """See `LaunchedTrial`. The signal ends what has not begun."""
        with contextlib.suppress(psutil.Error):
            self._process.send_signal(signal.SIGTERM)


class LocalLauncher:
    """Starts trials on this machine.

    Args:
        command: command of a trial, without its own overrides.
        slots: number of trials that may run at once.
        devices: `CUDA_VISIBLE_DEVICES` of each slot; empty: all trials see all GPUs.
    """

    poll_seconds = 0.2

    def __init__(self, command: Sequence[str], slots: int = 1, devices: Sequence[str] = ()) -> None:
        self._command, self._slots, self._devices = command, slots, devices

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> TrialProcess:
        environment = {"CUDA_VISIBLE_DEVICES": self._devices[slot]} if self._devices else {}
        if self._slots > 1:
            threads = max(1, usable_cores() // self._slots)
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        command = [*self._command, *overrides]
        return TrialProcess.start(command, folder, slot=slot, rung=rung, environment=environment)

    def find_all(self) -> dict[Path, LaunchedTrial]:
        return TrialProcess.find_all()
