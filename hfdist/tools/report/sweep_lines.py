"""A picture of a sweep as parallel coordinates: an upright axis for each key and the metric, a line for each trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hfdist.records.trials import Trial
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.swept import Scale, swept_keys
from hfdist.tools.report.text import escaped
from hfdist.units import short

_WIDTH, _HEIGHT = 1000, 320
"""Size of the picture, in the unit of its view box."""
_TOP, _BOTTOM, _SIDE = 24, 34, 70
"""Margins around the axes, in the same unit."""
_GOOD_SHARE = 0.25
"""Share of the trials, the best ones, whose lines are not faint."""


class _UprightAxis(NamedTuple):
    """The axis of a key, or of the metric, at an x of the picture."""

    x: float
    name: str
    scale: Scale

    def point(self, value: object) -> str:
        """Give the point of a value on this axis, as in the `points` of a polyline."""
        return f"{self.x:.1f},{_up(self.scale.share(value)):.1f}"


def draw_lines(trials: Sequence[Trial], metric: str) -> str:
    """Draw the picture as HTML; give an empty text for fewer than two keys, of which a chart shows all.

    Args:
        trials: trials with a value of the metric, the best first.
        metric: name of the metric.
    """
    keys = swept_keys(trials)
    if len(keys) < 2:
        return ""
    axes: dict[str, _UprightAxis] = {}
    for place, key in enumerate(keys):
        # A trial need not have all keys, and a value may be null.
        scale = Scale.of(key, [trial.values[key] for trial in trials if key in trial.values])
        axes[key] = _UprightAxis(_SIDE + place * (_WIDTH - 2 * _SIDE) / len(keys), key, scale)
    metric_axis = _UprightAxis(_WIDTH - _SIDE, metric, Scale.of(metric, [trial.value for trial in trials]))
    lines = [
        _line(trial, axes, metric_axis, is_best=place == 0, is_good=place < _GOOD_SHARE * len(trials))
        for place, trial in enumerate(trials)
    ]
    # The best trial is drawn last, on top of the others.
    drawn = "".join([*reversed(lines), *map(_draw_axis, (*axes.values(), metric_axis))])
    words = f"Each line is a trial, over its values and {escaped(metric)}; the best one is blue."
    words += " Those that are not in the best quarter are faint."
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}" font-size="13" '
        f'fill="currentColor">{drawn}</svg><p class="axis">{words}</p></figure>'
    )


def _line(
    trial: Trial, axes: Mapping[str, _UprightAxis], metric_axis: _UprightAxis, *, is_best: bool, is_good: bool
) -> str:
    """Draw a trial as a line across the axes of its keys, to the axis of the metric."""
    points = [axis.point(trial.values[key]) for key, axis in axes.items() if key in trial.values]
    points.append(metric_axis.point(trial.value))
    kind = colour(0) if is_best else "rest"
    opacity = "" if is_good else ' opacity="0.3"'
    title = f"<title>trial {trial.number}</title>"
    return f'<polyline class="line {kind}"{opacity} points="{" ".join(points)}">{title}</polyline>'


def _draw_axis(axis: _UprightAxis) -> str:
    x, scale = axis.x, axis.scale
    low, high = short(scale.low), short(scale.high)
    if scale.names:
        low, high = escaped(scale.names[0], 16), escaped(scale.names[-1], 16)
    return (
        f'<g class="grid"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_up(0)}" y2="{_up(1)}"/></g>'
        f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escaped(axis.name, 28)}</text>'
        f'<text x="{x + 4:.1f}" y="{_up(0) + 12}">{low}</text><text x="{x + 4:.1f}" y="{_up(1) - 6}">{high}</text>'
    )


def _up(share: float) -> float:
    """Give the y of a share of an axis, from 0 at the bottom to 1 at the top."""
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
