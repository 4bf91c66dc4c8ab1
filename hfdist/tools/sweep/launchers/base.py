"""The interface of launchers, which start the trials of a sweep. A trial outlives the sweep's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

LOG = "log.txt"
"""File in the folder of a trial with what its processes have printed."""


class LaunchedTrial(Protocol):
    """A trial that was started."""

    @property
    def slot(self) -> int:
        """The place among those that run side by side, from 0."""

    @property
    def rung(self) -> int:
        """The rung to whose end it trains, from 0."""

    @property
    def exit_code(self) -> int | None:
        """Exit code, once `poll` has said that it has ended; below zero: a signal ended it; None: not known."""

    def poll(self) -> bool:
        """Look whether the trial has ended: it neither runs nor waits to run. `exit_code` is set then."""

    def stop(self, *, can_save: bool) -> None:
        """Tell the trial to save and to stop. Call it once.

        Args:
            can_save: whether the run has begun, as its record says; before, a signal may not find it.
        """


class Launcher(Protocol):
    """Starts trials, and finds those that run."""

    poll_seconds: float
    """Seconds between two looks at what has ended."""

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> LaunchedTrial:
        """Start a trial with its own overrides in its folder, which is there; what it prints goes to `LOG`."""

    def find_all(self) -> dict[Path, LaunchedTrial]:
        """Give all trials that run, by their folders, also those of other sweeps."""


def trial_mark(slot: int, rung: int, folder: Path) -> str:
    """Give the mark by which `find_all` knows a trial."""
    return f"{slot} {rung} {folder.resolve()}"


def read_mark(text: str) -> tuple[int, int, Path] | None:
    """Give slot, rung and folder of `trial_mark`; None: it is none."""
    slot, _, rest = text.partition(" ")
    rung, _, folder = rest.partition(" ")
    return (int(slot), int(rung), Path(folder)) if slot.isdecimal() and rung.isdecimal() and folder else None
