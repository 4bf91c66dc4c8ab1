"""The axis of a chart: where it begins and ends, at round numbers, and the labels between."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.units import short

_LEAST_WIDTH = 1e-2
"""Share of its larger end that an axis spans at least: runs that are equal but for rounding lie on each other, and no
rounding fills a chart. Six digits of a coordinate are enough there."""
_SAME = 1e-9
"""Relative error of rounding: two values are the same if they differ by less."""


@dataclass(frozen=True)
class Axis:
    """An axis in the unit of its data; on a logarithmic one, data are logarithms to base 10."""

    low: float
    high: float
    """Value at the other end, which lies above `low`."""
    ticks: tuple[tuple[float, str], ...]
    """Labelled values, each with its label."""
    is_log: bool = False

    @property
    def width(self) -> float:
        """The distance from `low` to `high`, which is above 0."""
        return self.high - self.low

    def place(self, value: float) -> str:
        """Give where a value lies, in percent of the axis."""
        return f"{100 * (value - self.low) / self.width:.2f}%"


def linear(low: float, high: float, *, from_zero: bool = False, num_ticks: int = 4, fits: bool = True) -> Axis:
    """Give an axis of numbers that holds all values from `low` to `high`.

    Args:
        low: the lowest value.
        high: the highest value.
        from_zero: whether the axis has 0, too.
        num_ticks: number of labels; the axis may have one or two more or fewer.
        fits: whether both ends become round numbers; else they stay `low` and `high`, and labels lie between them.
    """
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(low), abs(high))
    if fits:
        missing = (_LEAST_WIDTH * largest or 1.0) - (high - low)
    else:
        # An axis of x is widened only where all values are the same.
        missing = 0.0 if high - low > _SAME * largest else largest or 1.0
    if missing > 0:
        low, high = (low, high + missing) if from_zero else (low - missing / 2, high + missing / 2)
    step = _round_step((high - low) / num_ticks)
    # Ticks are the multiples `number * step`: to the next ones outside if the axis fits them, else those inside.
    if fits:
        first, last = math.floor(low / step + _SAME), math.ceil(high / step - _SAME)
        low, high = first * step, last * step
    else:
        first, last = math.ceil(low / step - _SAME), math.floor(high / step + _SAME)
    ticks = tuple((number * step, _label(number * step, step)) for number in range(first, last + 1))
    return Axis(low, high, ticks)


def logarithmic(low: float, high: float) -> Axis:
    """Give an axis of the logarithms of values from `low` to `high`, both above 0, with labels at powers of 10."""
    first, last = math.floor(math.log10(low) + _SAME), math.ceil(math.log10(high) - _SAME)
    last = max(last, first + 1)
    # At most 6 labels.
    every = math.ceil((last - first) / 5)
    ticks = tuple((float(power), _label_of_power(power)) for power in range(first, last + 1, every))
    return Axis(float(first), float(last), ticks, is_log=True)


def _round_step(rough: float) -> float:
    """Give the smallest of 1, 2, 2.5 and 5 times a power of 10 that is not below a rough step."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - _SAME))


def _label(value: float, step: float) -> str:
    """Write a tick's value with as many decimals as its axis needs, whose ticks lie `step` apart."""
    if abs(value) >= 1e4:
        return short(value)
    if step < 1e-3 and abs(value) < 0.1:
        return f"{round(value / step) * step:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + _SAME))
    is_whole = round(step * 10**decimals, 6) % 1 == 0
    if not is_whole:  # A step such as 0.25 has one digit more than 0.2.
        decimals += 1
    return f"{value:,.{decimals}f}"


def _label_of_power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}"
