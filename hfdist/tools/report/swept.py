"""The keys that a sweep has varied, and how the values of one lie on an axis: as numbers, logarithms or names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfdist.records.trials import Trial
from hfdist.tools.report.text import number

_MOST_KEYS = 8
_RATE = ".lr"
_LOG_RANGE = 30.0
"""Values whose largest is so many times the smallest are drawn by their logarithms."""


def swept_keys(trials: Sequence[Trial]) -> list[str]:
    """List the keys of which trials have values."""
    return list(dict.fromkeys(key for trial in trials for key in trial.values))[:_MOST_KEYS]


@dataclass(frozen=True)
class Scale:
    """Where values of one key lie."""

    low: float
    high: float
    is_log: bool = False
    """Whether the logarithms of values are drawn; `low`, `high` and `place` stay without."""
    names: tuple[str, ...] = ()
    """All values in their order, where some are not numbers; each lies at its index."""

    @classmethod
    def of(cls, key: str, values: Sequence[object]) -> Scale:
        """Choose the scale for these values, of which there must be one."""
        places = [place for place in map(number, values) if place is not None]
        if len(places) < len(values):
            names = tuple(sorted({str(value) for value in values}))
            return cls(0.0, len(names) - 1.0, names=names)
        low, high = min(places), max(places)
        return cls(low, high, low > 0 and (key.endswith(_RATE) or high / low >= _LOG_RANGE))

    def place(self, value: object) -> float:
        """Give the number of a value, or the index of its name."""
        return float(self.names.index(str(value))) if self.names else number(value) or 0.0

    def share(self, value: object) -> float:
        """Give where a value lies between the lowest, 0, and the highest, 1; one that is alone in the middle."""
        low, high, own = self.low, self.high, self.place(value)
        if self.is_log:
            low, high, own = math.log(low), math.log(high), math.log(own)
        return (own - low) / (high - low) if high > low else 0.5
