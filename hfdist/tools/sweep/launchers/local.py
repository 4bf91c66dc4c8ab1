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
"""Variable of the environment with a TrialMark, which the processes of a trial have from their first moment on."""


class TrialProcess:
    """A launched trial: its first process, in a session of its own, so that it outlives the sweep's process."""

    def __init__(self, process: psutil.Process, slot: int, rung: int) -> None:
        self._process, self.slot, self.rung = process, slot, rung
        self.exit_code: int | None = None
        """The exit code after the end; None: before, or if another process has started the trial."""

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path, *, slot: int, rung: int, environment: Mapping[str, str]
    ) -> TrialProcess:
        """Start a trial by its command; what it prints goes to the file `LOG` in its folder."""
        mark = {_MARK: str(TrialMark(slot, rung, folder))}
        with (folder / LOG).open("ab") as log:
            # A psutil.Popen, which the object keeps: Python waits for a subprocess.Popen that nothing refers to, and
            # drops its exit code.
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
        """Give the trials that run on this machine, by their folders."""
        found: dict[Path, LaunchedTrial] = {}
        # A trial comes before the processes that it has started in sessions of their own, such as a tracker's service:
        # those have its mark, too, and the first process of a folder counts.
        for process in sorted(psutil.process_iter(["create_time"]), key=lambda one: one.info["create_time"] or 0.0):
            # A process may have gone by now, or belong to another user.
            with contextlib.suppress(psutil.Error, OSError):
                mark = read_mark(process.environ().get(_MARK, ""))
                # The ranks of a trial have its mark, too, but are in its session.
                begins_session = os.getsid(process.pid) == process.pid
                if mark is not None and begins_session and process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(mark.folder, cls(process, mark.slot, mark.rung))
        return found

    @property
    def pid(self) -> int:
        """Process id of the first process; it is the id of the session, too."""
        return self._process.pid

    def poll(self) -> bool:
        """Look whether the process has ended; if it has, find its exit code."""
        try:
            # A child of this process that has ended is a zombie until `wait`; another process's child is gone.
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return True
        with contextlib.suppress(psutil.Error):
            self.exit_code = self._process.wait(timeout=0)
        return True

    def stop(self, *, can_save: bool) -> None:
        """Send SIGTERM: a run saves and stops, and a process whose run has not begun ends."""
        # The process may have ended by now.
        with contextlib.suppress(psutil.Error):
            self._process.send_signal(signal.SIGTERM)


class LocalLauncher:
    """A launcher of trials on this machine.

    Args:
        command: command of a trial, without the overrides of each trial.
        slots: number of trials that may run at once.
        devices: `CUDA_VISIBLE_DEVICES` of each slot; empty: all trials see all GPUs.
    """

    poll_seconds = 0.2

    def __init__(self, command: Sequence[str], slots: int = 1, devices: Sequence[str] = ()) -> None:
        self._command, self._slots, self._devices = command, slots, devices

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> TrialProcess:
        """Start a trial with the devices of its slot, and with its share of this machine's cores."""
        environment = {"CUDA_VISIBLE_DEVICES": self._devices[slot]} if self._devices else {}
        if self._slots > 1:
            threads = max(1, usable_cores() // self._slots)
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        command = [*self._command, *overrides]
        return TrialProcess.start(command, folder, slot=slot, rung=rung, environment=environment)

    def find_all(self) -> dict[Path, LaunchedTrial]:
        """Give the trials that run on this machine, by their folders."""
        return TrialProcess.find_all()
