"""How far a rank has come, and what it tells of that in each beat. Loads no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

T = TypeVar("T")

WARM_UP_STEPS = 3
"""The first steps compile, connect and fill buffers: only the last of them is a measure for later ones."""

STARTING, EVALUATING, SAVING, ENDING = "starting", "evaluating", "saving", "ending"
"""What a rank may do for minutes without a sign of progress. Starting ends with the first step: until then models are
compiled, connections made and buffers filled."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank says about itself; seconds are by its own clock, so that clocks need not agree."""

    number: int
    host: str = ""
    marks: int = 0
    """Grows on all ranks at the same places, so that the rank with the fewest is behind."""
    mark: str = "the start"
    """The last such place."""
    step: int = 0
    idle_seconds: float = 0.0
    """Since that mark."""
    longest_idle_seconds: float = 0.0
    """Between two marks, so far; without evaluations and saves, and without the warm-up but its last step."""
    exempt: str | None = None
    """What it does without marks: STARTING, EVALUATING, SAVING, ENDING or compiling; None: it should make some."""
    waits_in: str | None = None
    """The collective in which it is, where that is known."""
    broken_seconds: float | None = None
    """Since a connection to another rank broke."""
    left: int | None = None
    """The exit code of a rank that has ended by itself; this is its last beat."""
    has_written: bool = False
    """Whether its stack is on the disk."""

    def to_json(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Heartbeat:
        """Read it."""
        return cls(**json.loads(text))


class Progress:
    """Counts a rank's marks. Written by the main thread, read by that of the watch."""

    def __init__(self) -> None:
        self.marks = 0
        self.mark_name = "the start"
        self.step = 0
        self.exempt: str | None = STARTING
        self.longest_idle_seconds = 0.0
        self._marked_seconds = time.monotonic()
        self._steps_done = 0
        self._longest_of_step = 0.0

    @property
    def idle_seconds(self) -> float:
        """Since the last mark."""
        return time.monotonic() - self._marked_seconds

    def mark(self, name: str) -> None:
        """Come to a place to which all ranks come equally often."""
        if self.exempt in (None, STARTING):
            self._longest_of_step = max(self._longest_of_step, self.idle_seconds)
            self.longest_idle_seconds = max(self.longest_idle_seconds, self._longest_of_step)
        self._marked_seconds = time.monotonic()
        self.marks, self.mark_name = self.marks + 1, name

    def step_done(self, step: int) -> None:
        """Come to the end of a step, of which `step` are done in all."""
        self.mark("the end of a step")
        self.step = step
        self._steps_done += 1
        if self._steps_done == WARM_UP_STEPS:
            self.longest_idle_seconds = self._longest_of_step
        self._longest_of_step = 0.0

    def marking(self, batches: Iterable[T]) -> Iterator[T]:
        """Give the batches, with a mark behind each."""
        for batch in batches:
            self.mark("a batch that was read")
            yield batch
