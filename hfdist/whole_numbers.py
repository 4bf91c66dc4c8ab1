"""Whole numbers that a file holds, checked before they count anything."""

from __future__ import annotations

MOST = 2**53 - 1
"""All up to here are exact in float64, in which other programs read JSON."""


def whole_number(value: object) -> int:
    """Give a count that a file holds; ValueError: it is no whole number from 0 to `MOST`."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{str(value)[:40]} is no whole number from 0 to 2**53 - 1")
    return value
