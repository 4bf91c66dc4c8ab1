"""Ranges of config values, declared beside the field and checked in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any

LIMIT = "hfdist.limit"
DAY_SECONDS = 86_400.0
"""The longest limit of a wait for another process."""


@dataclass(frozen=True)
class Limit:
    """A test of one value, and what it allows, in words."""

    allowed: str
    accepts: Callable[[Any], bool]


def limited(
    default: object = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:  # as of `dataclasses.field`: what stands right of a field of any type
    """Declare a dataclass field whose number must lie in a range; NaN and infinity never do."""
    words = [
        f"{sign} {bound:g}" for sign, bound in ((">=", at_least), (">", above), ("<=", at_most)) if bound is not None
    ]

    def accepts(value: float) -> bool:
        return (
            # False for NaN and infinity, and for a whole number that is larger than any float.
            abs(value) <= sys.float_info.max
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (at_most is None or value <= at_most)
        )

    return field(default=default, metadata={LIMIT: Limit(f"a number {' and '.join(words)}", accepts)})
