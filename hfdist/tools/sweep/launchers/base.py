"""The interface of launchers, which start the trials of a sweep, so that a trial outlives the sweep's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

LOG = "log.txt"
"""File in the folder of a trial with what its processes have printed."""


class LaunchedTrial(Protocol):
    """A trial that was started: its processes, or its job."""

    @property
    def slot(self) -> int:
        """The trial's place among the trials that run side by side, from 0."""

    @property
    def rung(self) -> int:
        """The rung to whose end the trial trains, from 0."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the trial once `poll` has returned True.

        It is below zero if a signal has ended the trial, and None if it is not known.
        """

    def poll(self) -> bool:
        """Look whether the trial has ended, so that it neither runs nor waits to run."""

    def stop(self, *, can_save: bool) -> None:
        """Tell the trial to save and to stop. Call it once.

        Args:
            can_save: whether the run has begun, as its record says; before, a signal may not find it.
        """


class Launcher(Protocol):
    """What starts trials, and finds the trials that run."""

    poll_seconds: float
    """Seconds between two looks at what has ended."""

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> LaunchedTrial:
        """Start a trial; what it prints goes to the file `LOG` in its folder.

        Args:
            overrides: the overrides of this trial, beside those that all trials have.
            folder: the trial's folder, which exists.
            slot: the trial's place among those that run side by side, from 0.
            rung: the rung to whose end it trains, from 0.

        Raises:
            ConfigError: the trial cannot be started.
        """

    def find_all(self) -> dict[Path, LaunchedTrial]:
        """Give all trials that run or wait to run, by their folders, also those of other sweeps.

        Raises:
            ConfigError: it is not known what runs.
        """


class TrialMark(NamedTuple):
    """A text that goes with a launched trial, such as `0 2 /runs/sweep/trial-0001`, so that `find_all` knows it."""

    slot: int
    rung: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.slot} {self.rung} {self.folder.resolve()}"


def read_mark(text: str) -> TrialMark | None:
    """Read a text as a mark; None: it is no mark."""
    slot, _, rest = text.partition(" ")
    # The folder may have spaces.
    rung, _, folder = rest.partition(" ")
    if not slot.isdecimal() or not rung.isdecimal() or not folder:
        return None
    return TrialMark(int(slot), int(rung), Path(folder))
