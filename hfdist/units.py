"""Quantities as a person reads them: about three digits, and a unit that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SECONDS_PER_HOUR = 3600
_KWH = ((1e3, "MWh"), (1.0, "kWh"), (1e-3, "Wh"), (1e-6, "mWh"))
_GRAMS = ((1e6, "t"), (1e3, "kg"), (1.0, "g"), (1e-3, "mg"))
_LEAST = 0.001
"""The smallest number that is shown, in the smallest unit; of one below only that it is less."""


def energy(kwh: float) -> str:
    """Give energy, such as `7.65 mWh`."""
    return _in_unit(kwh, _KWH)


def mass(grams: float) -> str:
    """Give a mass, such as `12.3 kg`."""
    return _in_unit(grams, _GRAMS)


def money(amount: float, currency: str) -> str:
    """Give money, such as `1.05 EUR`."""
    if 0 < amount < 0.005:
        return f"less than 0.01 {currency}"
    text = f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.2f}".removesuffix(".00")
    return f"{text} {currency}"


def _in_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    factor, unit = _fitting(value, units)
    number = float(f"{value:.3g}") / factor
    if 0 < abs(number) < _LEAST:
        return f"less than {_LEAST} {unit}"
    decimals = 0 if number == 0 else max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _fitting(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    rounded = abs(float(f"{value:.3g}"))
    return next((one for one in units if rounded >= one[0]), units[-1])


def energy_unit(most_kwh: float) -> tuple[float, str]:
    """Give the factor from kWh, and the unit, in which `energy` gives so much: for a curve whose values share one."""
    factor, unit = _fitting(most_kwh, _KWH)
    return 1 / factor, unit


def short(value: float) -> str:
    """Give a number with about three digits, such as `1.23 M` or `0.0453`."""
    magnitude = abs(value)
    for unit, word in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if magnitude >= unit:
            return f"{_digits(value / unit)} {word}"
    if magnitude >= 1e4:
        return f"{_digits(value / 1e3)} k"
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if 0 < magnitude < 1e-3 else _digits(value)


def _digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100 or value % 1 == 0:
        return f"{value:.0f}"
    decimals = 1 if magnitude >= 10 else 2 if magnitude >= 1 else 4
    return f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """Give a duration, such as `3 h 12 min` or `81 ms`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.2f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def size(num_bytes: float) -> str:
    """Give bytes, such as `1.6 MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        number = num_bytes / 1024**power
        if number >= 1:
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def share(value: float) -> str:
    """Give a share from 0 to 1 in percent, such as `52 %` or `3.1 %`."""
    return f"{100 * value:,.0f} %" if value >= 0.1 or value == 0 else f"{100 * value:,.1f} %"


def list_first(names: Iterable[object], most: int = 5) -> str:
    """List the first few, and say how many more there are; an empty text for none."""
    listed = list(map(str, names))
    more = f", and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def count(number_of: int, word: str) -> str:
    """Give `1 save` or `2 saves`."""
    return f"{number_of:,} {word}{'' if number_of == 1 else 's'}"
