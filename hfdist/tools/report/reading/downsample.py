"""Fewer points of a curve that look the same: the lowest and the highest of each stretch stay, so a spike does."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

Point = tuple[float, float | None]
"""x and y; no y: the curve has a gap."""


def keep_extremes(points: Sequence[Point], most: int) -> list[Point]:
    """Give at most `most` points, at least 8, in order: the first, the last, and extremes of equal stretches of x.

    x must not fall. A stretch with no value at all stays a gap.
    """
    if len(points) <= most:
        return list(points)
    # Each stretch keeps two points, and both ends are kept.
    kept = [extreme for stretch in _stretches(points, most // 2 - 1) for extreme in _extremes(stretch)]
    return [*[points[0]][: points[0] != kept[0]], *kept, *[points[-1]][: points[-1] != kept[-1]]]


def means(points: Sequence[Point], most: int) -> list[Point]:
    """Give the mean x and y of at most `most` equal stretches of x."""
    stretches = _stretches(points, most)
    known = [[(x, y) for x, y in stretch if y is not None] for stretch in stretches]
    return [(fmean(x for x, _ in own), fmean(y for _, y in own)) for own in known if own]


def _stretches(points: Sequence[Point], most: int) -> list[list[Point]]:
    first, last = points[0][0], points[-1][0]
    width = (last - first) / most or 1.0
    stretches: dict[int, list[Point]] = {}
    before: int | None = None
    stretch: list[Point] = []
    for point in points:
        place = int((point[0] - first) / width)
        if place != before:
            before, stretch = place, stretches.setdefault(min(place, most - 1), [])
        stretch.append(point)
    return list(stretches.values())


def _extremes(stretch: list[Point]) -> list[Point]:
    known = [(y, number) for number, (_, y) in enumerate(stretch) if y is not None]
    if not known:
        return [stretch[0]]
    return [stretch[number] for number in sorted({min(known)[1], max(known)[1]})]
