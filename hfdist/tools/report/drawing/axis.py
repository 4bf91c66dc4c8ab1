"""Round numbers for an axis, and their labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.units import short

_LEAST_WIDTH = 1e-2
"""Share of its larger end that an axis spans at least: runs that are equal but for rounding lie on each other, and no
rounding fills a chart. Six digits of a coordinate are enough there."""
_SAME = 1e-9
"""Share of the larger end by which two places are one."""


@dataclass(frozen=True)
class Axis:
    """An axis in the unit of its data; on a logarithmic one, data are logarithms to base 10."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    @property
    def width(self) -> float:
        """What it spans; never 0."""
        return self.high - self.low

    def place(self, value: float) -> str:
        """Give where a value lies, in percent of the axis."""
        return f"{100 * (value - self.low) / self.width:.2f}%"


def linear(low: float, high: float, *, from_zero: bool = False, num_ticks: int = 4, fits: bool = True) -> Axis:
    """Give an axis on which all values from `low` to `high` lie, from one round number to another if it `fits` them."""
    low, high = (min(low, 0.0), max(high, 0.0)) if from_zero else (low, high)
    largest = max(abs(low), abs(high))
    if fits:
        missing = (_LEAST_WIDTH * largest or 1.0) - (high - low)
    else:
        missing = 0.0 if high - low > _SAME * largest else largest or 1.0
    if missing > 0:
        low, high = (low, high + missing) if from_zero else (low - missing / 2, high + missing / 2)
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if not fits:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = tuple((number * step, _label(number * step, step, decimals)) for number in range(first, last + 1))
    return Axis(first * step if fits else low, last * step if fits else high, ticks)


def logarithmic(low: float, high: float) -> Axis:
    """Give an axis of the logarithms of values > 0."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = -(-(last - first) // 5)
    ticks = tuple((float(power), _power(power)) for power in range(first, last + 1, every))
    return Axis(float(first), float(last), ticks, is_log=True)


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _label(value: float, step: float, decimals: int) -> str:
    if abs(value) >= 1e4:
        return short(value)
    if step < 1e-3 and abs(value) < 0.1:
        return f"{round(value / step) * step:.3g}"
    # 2.5 and its kin need one digit more.
    decimals += int(round(step * 10**decimals, 6) % 1 != 0)
    return f"{value:,.{decimals}f}"


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}"
