"""The heartbeat of a rank: what it says of itself, and the marks of progress that this is made of. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeVar, get_origin, get_type_hints

T = TypeVar("T")

WARM_UP_STEPS = 3
"""The first steps compile, connect and fill buffers: only the last of them is a measure for later ones."""

STARTING, EVALUATING, SAVING, ENDING = "starting", "evaluating", "saving", "ending"
MEETING = "meeting other islands"
GENERATING = "waiting for generators"
ACTING = "waiting for environments"
"""States in which a rank may be for minutes without progress. Starting ends with the first step: until then models are
compiled, connections made and buffers filled."""


class Heartbeat(NamedTuple):
    """The state of a rank; seconds are by its own clock, so that clocks need not agree."""

    number: int
    host: str = ""
    marks: int = 0
    """Number of marks. Marks are at the same places on all ranks, so the rank with the fewest is the last one."""
    mark: str = "the start"
    """Place of the last mark."""
    step: int = 0
    idle_seconds: float = 0.0
    """Seconds since the last mark."""
    longest_idle_seconds: float = 0.0
    """The most seconds between two marks so far, without evaluations, saves, and the warm-up but its last step."""
    exempt: str | None = None
    """State without marks: STARTING, EVALUATING, SAVING, MEETING, GENERATING, ACTING, ENDING or compiling; None: marks
    are expected."""
    waits_in: str | None = None
    """The collective in which it is, where that is known."""
    broken_seconds: float | None = None
    """Seconds since a connection to another rank broke; None: none has."""
    left: int | None = None
    """The exit code of a rank that has ended by itself; this is its last beat."""
    has_written: bool = False
    """Whether its stacks are on the disk."""
    pid: int = 0
    """Id of the rank's process on `host`."""
    asked: str | None = None
    """The last request to write what the ranks are doing; rank 0 passes it on."""


class PeerState(NamedTuple):
    """A rank's last heartbeat, and the seconds since it came."""

    beat: Heartbeat
    silent_seconds: float = 0.0


Read = TypeVar("Read", bound=NamedTuple)
"""A named tuple that is read from a message or a file."""


def as_tuple(kind: type[Read], values: Sequence[object]) -> Read:
    """Make a named tuple of values that were read; TypeError: their number or a type is wrong."""
    hints = _types_of(kind)
    if len(values) != len(hints) or not all(map(isinstance, values, hints)):
        raise TypeError(f"no {kind.__name__}")
    return kind._make(values)


@cache
def _types_of(kind: type[NamedTuple]) -> list[type]:
    # `isinstance` takes no list[int]: what a list holds is for the caller to check.
    return [list if get_origin(hint) is list else hint for hint in get_type_hints(kind).values()]


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
        """Time since the last mark, by the clock."""
        return time.monotonic() - self._marked_seconds

    def mark(self, name: str) -> None:
        """Mark a place that all ranks reach equally often."""
        if self.exempt in (None, STARTING):
            self._longest_of_step = max(self._longest_of_step, self.idle_seconds)
            self.longest_idle_seconds = max(self.longest_idle_seconds, self._longest_of_step)
        self._marked_seconds = time.monotonic()
        self.marks, self.mark_name = self.marks + 1, name

    def step_done(self, step: int) -> None:
        """Mark the end of a step; `step`: number of steps done in all."""
        self.mark("the end of a step")
        self.step = step
        self._steps_done += 1
        if self._steps_done == WARM_UP_STEPS:
            self.longest_idle_seconds = self._longest_of_step
        self._longest_of_step = 0.0

    def marking(self, batches: Iterable[T]) -> Iterator[T]:
        """Give the batches, with a mark after each is read."""
        for batch in batches:
            self.mark("a batch that was read")
            yield batch


def beat_seconds(heartbeat_seconds: float) -> float:
    """Give the time between beats: a second, which costs nothing, or four beats within the limit."""
    return min(heartbeat_seconds / 4, 1.0)
