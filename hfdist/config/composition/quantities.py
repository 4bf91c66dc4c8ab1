"""Numbers as people write them, with a unit: `2k`, `5%`, `30min`; in the unit of the key that they are given to."""

from __future__ import annotations

import re

from hfdist.config.plain_values import accepts_text
from hfdist.config.schema import find_key

_COUNTS = {"%": 0.01, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hours": 3600.0, "d": 86400.0, "days": 86400.0}
_UNITS = {
    "_bytes": {"b": 1.0} | {f"{unit}{end}": size for unit, size in _BYTES.items() for end in ("", "b")},
    "_seconds": _SECONDS,
    "_hours": {unit: seconds / 3600 for unit, seconds in _SECONDS.items()},
    # 4k tokens of a sequence are 4,096.
    "sequence_length": _COUNTS | {"k": 1024.0},
}


def read_quantity(key: str, text: str) -> str | None:
    """Give the number that the key takes in place of one with a unit; None: it is none, or one that is not allowed."""
    known, written = find_key(key), re.fullmatch(r"([\d_]*\.?\d+)\s*([a-zA-Z]+|%)", text.strip())
    factor = next((units for end, units in _UNITS.items() if key.endswith(end)), _COUNTS)
    if known is None or known.is_text or written is None or written[2].lower() not in factor:
        return None
    value = round(float(written[1].replace("_", "")) * factor[written[2].lower()], 9)
    number = f"{int(value)}" if value.is_integer() else f"{value:g}"
    is_allowed = accepts_text(known, number) and (known.limit is None or known.limit.accepts(float(number)))
    return number if is_allowed else None
