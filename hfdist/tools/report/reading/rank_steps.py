"""Times of each rank, summed over stretches of steps; a long run has wider stretches, not more of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap, zip_longest
from typing import TypeVar

from hfdist.records.rank_lines import STEPS, RankColumn
from hfdist.tools.report.text import number, numbers

Number = TypeVar("Number", int, float)

STEP = RankColumn.step_seconds.value
"""Key of the seconds of a whole step in a line."""
COMPUTE, DATA, WAIT = (
    RankColumn.compute_seconds.value,
    RankColumn.data_seconds.value,
    RankColumn.wait_seconds.value,
)
PARTS = (COMPUTE, DATA, WAIT)
"""Keys of the parts of a step, each in seconds."""
_MOST_STRETCHES = 97
"""Most stretches: the first line, and 48 pairs that become 48 stretches once there are more lines."""
_MOST_STEPS = 2**31
"""Largest number of steps that a line may count for: a file may say anything."""


@dataclass
class Stretch:
    """Some lines in a row, as sums over their steps for each rank."""

    first_step: float
    last_step: float
    num_lines: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each rank in all these steps, by the key of the step or of a part."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Number of steps in each of `sums`: a line may lack a rank's value."""
    peak_bytes: list[float] = field(default_factory=list)
    """Highest memory of each rank, in bytes; 0: not known."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line, for as many steps as it says; a line that does not say it is about one step."""
        self.num_lines += 1
        steps = int(min(max(number(line.get(STEPS)) or 1, 1), _MOST_STEPS))
        for name in (STEP, *PARTS):
            means = numbers(line.get(name))
            sums = [0.0 if mean is None else steps * mean for mean in means]
            self._add(name, sums, counts=[0 if mean is None else steps for mean in means])
        self._raise_peaks([value or 0.0 for value in numbers(line.get(RankColumn.peak_bytes.value))])

    def join(self, other: Stretch) -> None:
        """Add the lines of another stretch, which must follow this one."""
        self.last_step, self.num_lines = other.last_step, self.num_lines + other.num_lines
        for name, sums in other.sums.items():
            self._add(name, sums, other.counts[name])
        self._raise_peaks(other.peak_bytes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of which something is known."""
        return max(map(len, self.sums.values()), default=0)

    def means(self, name: str) -> list[float | None]:
        """Give the mean seconds a step of each rank, for the step or one of its parts; None: not known."""
        sums_and_counts = zip(self.sums.get(name, ()), self.counts.get(name, ()), strict=True)
        return [seconds / count if count else None for seconds, count in sums_and_counts]

    def busy(self) -> list[float | None]:
        """Give the seconds a step in which each rank computed or waited for data; None: not known.

        In this time the other ranks may have to wait for it.
        """
        compute, data = self.means(COMPUTE), self.means(DATA)
        data += [None] * (len(compute) - len(data))  # A line may lack the last ranks of a part.
        pairs = zip(compute, data, strict=False)
        return [None if computed is None else computed + (waited or 0.0) for computed, waited in pairs]

    def _add(self, name: str, sums: list[float], counts: list[int]) -> None:
        if sums:
            self.sums[name] = _combine(operator.add, self.sums.get(name, []), sums)
            self.counts[name] = _combine(operator.add, self.counts.get(name, []), counts)

    def _raise_peaks(self, peaks: list[float]) -> None:
        self.peak_bytes = _combine(max, self.peak_bytes, peaks)


def _combine(
    function: Callable[[Number, Number], Number], first: Sequence[Number], second: Sequence[Number]
) -> list[Number]:
    """Combine the two values of each rank; a rank that is missing in one sequence has 0 there."""
    return list(starmap(function, zip_longest(first, second, fillvalue=0)))


class RankSteps:
    """The lines of `ranks.jsonl`, as stretches in order.

    The first line is a stretch of its own, as its steps are slower. Where the others become too many, they are joined:

        lines       0 | 1 2 3 4 5 6
        stretches   0 | 1 2 3 4 5 6     a line each
                    0 | 12  34  56      then two lines each, then four ...
    """

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._lines_a_stretch = 1
        # Number of stretches from which on `total` leaves out the first one.
        self._least_stretches = 3

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line; one without the seconds of a step, or with a step no later than the last one, adds nothing."""
        step = number(line.get("step"))
        if STEPS in line:
            # A line with a number of steps may be about many: the second line of a short run has all but the first.
            self._least_stretches = 2
        if step is None or STEP not in line or (self.stretches and step <= self.stretches[-1].last_step):
            return
        if not self.stretches or self.stretches[-1].num_lines >= self._lines_a_stretch:
            if len(self.stretches) == _MOST_STRETCHES:
                self._halve()
            self.stretches.append(Stretch(step, step))
        self.stretches[-1].last_step = step
        self.stretches[-1].add(line)

    def _halve(self) -> None:
        """Join each two neighbours, without the first stretch."""
        kept, joined = self.stretches[1::2], self.stretches[2::2]
        for stretch, next_stretch in zip(kept, joined, strict=True):
            stretch.join(next_stretch)
        self.stretches = [self.stretches[0], *kept]
        self._lines_a_stretch *= 2

    def total(self) -> Stretch | None:
        """Give all lines as one stretch; None: there are none.

        The first line is left out where others follow: in its steps everything is done for the first time.
        """
        has_enough = len(self.stretches) >= self._least_stretches
        counted = self.stretches[1:] if has_enough else self.stretches
        return join_stretches(counted) if counted else None


def join_stretches(stretches: Sequence[Stretch]) -> Stretch:
    """Give one or more stretches, each of which follows the one before, as a single stretch."""
    joined = Stretch(stretches[0].first_step, stretches[-1].last_step)
    for stretch in stretches:
        joined.join(stretch)
    return joined
