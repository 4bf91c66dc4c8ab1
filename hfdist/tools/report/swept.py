"""The keys that a sweep has varied, and how the values of one lie on an axis: as numbers, logarithms or names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfdist.records.trials import Trial
from hfdist.tools.report.text import number

_MOST_KEYS = 8
"""Most keys that are drawn."""
_RATE = ".lr"
"""What the keys of learning rates end with; their values are always drawn by their logarithms."""
_LOG_RANGE = 30.0
"""Values are drawn by their logarithms if the largest is at least this many times the smallest."""


def swept_keys(trials: Sequence[Trial]) -> list[str]:
    """Give the keys that a sweep has varied, in the order in which trials have them."""
    return list(dict.fromkeys(key for trial in trials for key in trial.values))[:_MOST_KEYS]


@dataclass(frozen=True)
class Scale:
    """The range of one key's values, as numbers or as indices of names."""

    low: float
    """The lowest number, or 0 for names."""
    high: float
    """The highest number, or the index of the last name."""
    is_log: bool = False
    """Whether a drawing places values by their logarithms; `low` and `high` are the values themselves."""
    names: tuple[str, ...] = ()
    """All values as sorted texts, if some are not numbers; empty: all are numbers."""

    @classmethod
    def of(cls, key: str, values: Sequence[object]) -> Scale:
        """Choose the scale for one or more values of a key."""
        numbers = [found for found in map(number, values) if found is not None]
        if len(numbers) < len(values):
            names = tuple(sorted({str(value) for value in values}))
            return cls(0.0, len(names) - 1.0, names=names)
        low, high = min(numbers), max(numbers)
        is_log = low > 0 and (key.endswith(_RATE) or high / low >= _LOG_RANGE)
        return cls(low, high, is_log)

    def place(self, value: object) -> float:
        """Give a value as a number, or the index of its name."""
        if self.names:
            return float(self.names.index(str(value)))
        return number(value) or 0.0

    def share(self, value: object) -> float:
        """Give where a value lies on an axis, from 0 for the lowest to 1 for the highest; 0.5 if all are equal."""
        low, high, place = self.low, self.high, self.place(value)
        if self.is_log:
            low, high, place = math.log(low), math.log(high), math.log(place)
        return (place - low) / (high - low) if high > low else 0.5
