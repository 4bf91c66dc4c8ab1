"""The interface of launchers, which start the trials of a sweep. A trial outlives the sweep's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

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


class TrialMark(NamedTuple):
    """What a launched trial carries, so that `find_all` knows it."""

    slot: int
    rung: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.slot} {self.rung} {self.folder.resolve()}"


def read_mark(text: str) -> TrialMark | None:
    """Read the text of a mark; None: it is none."""
    slot, _, rest = text.partition(" ")
    rung, _, folder = rest.partition(" ")
    is_mark = slot.isdecimal() and rung.isdecimal() and bool(folder)
    return TrialMark(int(slot), int(rung), Path(folder)) if is_mark else None
