"""Fewer points that draw the same curve: each stretch keeps its lowest and its highest point, so that spikes stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

Point = tuple[float, float | None]
"""x and y of a point of a curve; y is None where the curve has a gap."""


def keep_extremes(points: Sequence[Point], most: int) -> list[Point]:
    """Give at most `most` of the points, in their order: both ends, and the extremes of equal stretches of x.

    A stretch in which no point has a y keeps one point, so that the gap stays.

    Args:
        points: points whose x never falls.
        most: 8 or more.
    """
    if len(points) <= most:
        return list(points)
    # Each stretch keeps two points; the two that are left are the ends.
    kept = [extreme for stretch in _stretches(points, most // 2 - 1) for extreme in _extremes(stretch)]
    if kept[0] != points[0]:
        kept.insert(0, points[0])
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def means(points: Sequence[Point], most: int) -> list[Point]:
    """Give the mean x and the mean y of at most `most` equal stretches of x; stretches without a y are left out."""
    found: list[Point] = []
    for stretch in _stretches(points, most):
        known = [(x, y) for x, y in stretch if y is not None]
        if known:
            found.append((fmean(x for x, _ in known), fmean(y for _, y in known)))
    return found


def _stretches(points: Sequence[Point], num_stretches: int) -> list[list[Point]]:
    """Split points into stretches that are equally wide in x; a stretch without a point is left out."""
    first_x, last_x = points[0][0], points[-1][0]
    # Points that all have the same x are one stretch, of any width.
    width = (last_x - first_x) / num_stretches or 1.0

    def number_of_stretch(point: Point) -> int:
        # The last point lies on the upper edge of the last stretch.
        return min(int((point[0] - first_x) / width), num_stretches - 1)

    return [list(stretch) for _, stretch in groupby(points, number_of_stretch)]


def _extremes(stretch: list[Point]) -> list[Point]:
    """Give the lowest and the highest point in their order, or the first point where none has a y."""
    places_by_y = [(y, place) for place, (_, y) in enumerate(stretch) if y is not None]
    if not places_by_y:
        return [stretch[0]]
    (_, lowest), (_, highest) = min(places_by_y), max(places_by_y)
    return [stretch[place] for place in sorted({lowest, highest})]
