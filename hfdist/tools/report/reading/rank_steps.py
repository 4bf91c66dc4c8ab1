"""Times of each rank: means of all steps, and of stretches that stay few however long a run is."""

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
"""Key of the seconds of a step in a line."""
COMPUTE, DATA, WAIT = (
    RankColumn.compute_seconds.value,
    RankColumn.data_seconds.value,
    RankColumn.wait_seconds.value,
)
PARTS = (COMPUTE, DATA, WAIT)
"""Keys of the parts of a step."""
_MOST_STRETCHES = 97
"""Most stretches. Where there are more, each two neighbours become one, but for the first line."""
_MOST_STEPS = 2**31
"""Most steps of a line: a file may say anything."""


@dataclass
class Stretch:
    """Some lines in a row: sums by rank over their steps, and the number of steps in each sum."""

    first_step: float
    last_step: float
    num_lines: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    peak_bytes: list[float] = field(default_factory=list)
    """Highest memory of each rank, in bytes; 0: not known."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line, for as many steps as it says; lines of few ranks do not say it, and count as one step each."""
        self.num_lines += 1
        steps = int(min(max(number(line.get(STEPS)) or 1, 1), _MOST_STEPS))
        for name in (STEP, *PARTS):
            values = numbers(line.get(name))
            self._add(
                name, [steps * (value or 0.0) for value in values], [steps * (value is not None) for value in values]
            )
        self._raise_peaks([value or 0.0 for value in numbers(line.get(RankColumn.peak_bytes.value))])

    def join(self, other: Stretch) -> None:
        """Add the lines of the next one."""
        self.last_step, self.num_lines = other.last_step, self.num_lines + other.num_lines
        for name, sums in other.sums.items():
            self._add(name, sums, other.counts[name])
        self._raise_peaks(other.peak_bytes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of which something is known."""
        return max(map(len, self.sums.values()), default=0)

    def means(self, name: str) -> list[float | None]:
        """Give seconds a step by rank; None: not known."""
        pairs = zip(self.sums.get(name, ()), self.counts.get(name, ()), strict=True)
        return [value / number_of if number_of else None for value, number_of in pairs]

    def busy(self) -> list[float | None]:
        """Give the seconds a step in which each rank computed or waited for data, so that others waited for it."""
        compute, data = self.means(COMPUTE), self.means(DATA)
        data += [None] * (len(compute) - len(data))
        return [None if own is None else own + (of_data or 0.0) for own, of_data in zip(compute, data, strict=False)]

    def _add(self, name: str, values: list[float], counts: list[int]) -> None:
        if values:
            self.sums[name] = _each(operator.add, self.sums.get(name, []), values)
            self.counts[name] = _each(operator.add, self.counts.get(name, []), counts)

    def _raise_peaks(self, peaks: list[float]) -> None:
        self.peak_bytes = _each(max, self.peak_bytes, peaks)


def _each(join: Callable[[Number, Number], Number], first: Sequence[Number], second: Sequence[Number]) -> list[Number]:
    """Join values of the same rank; a rank that one of them lacks counts as 0 there."""
    return list(starmap(join, zip_longest(first, second, fillvalue=0)))


class RankSteps:
    """The lines of `ranks.jsonl`, as stretches in order."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._lines_a_stretch, self._least_stretches = 1, 3

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line; one whose step is not a later one, or which does not have all ranks, counts for nothing."""
        step = number(line.get("step"))
        if STEPS in line:
            # In a short run the second line has all steps but the first.
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
        pairs = list(zip(self.stretches[1::2], self.stretches[2::2], strict=True))
        for first, second in pairs:
            first.join(second)
        self.stretches = [self.stretches[0], *(first for first, _ in pairs)]
        self._lines_a_stretch *= 2

    def total(self) -> Stretch | None:
        """Give all lines as one stretch, without the first line: in its steps everything is done for the first time."""
        own = self.stretches[1:] if len(self.stretches) >= self._least_stretches else self.stretches
        if not own:
            return None
        total = Stretch(own[0].first_step, own[-1].last_step)
        for stretch in own:
            total.join(stretch)
        return total
