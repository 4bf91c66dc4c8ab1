"""The metric of a sweep over each key that it has varied: a dot a trial, and the best one in its own colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hfdist.records.trials import Trial
from hfdist.tools.report.drawing.axis import Axis, logarithmic
from hfdist.tools.report.drawing.chart import Chart, Curve, colour, draw
from hfdist.tools.report.swept import Scale, swept_keys
from hfdist.tools.report.text import escaped
from hfdist.units import short

_MOST_NAMES = 8
_MOST_NUMBERS = 6
"""Up to so many different numbers are themselves the labels of the axis."""


def draw_by_value(trials: Sequence[Trial], metric: str) -> str:
    """Draw a chart a key, of trials with a value of the metric, the best first."""
    drawn = "".join(_chart(key, trials, metric) for key in swept_keys(trials))
    return f'<div class="charts small">{drawn}</div>'


def _chart(key: str, trials: Sequence[Trial], metric: str) -> str:
    own = [trial for trial in trials if trial.values.get(key) is not None]
    if not own:
        return ""
    scale = Scale.of(key, [trial.values[key] for trial in own])
    points = [(scale.place(trial.values[key]), trial.value) for trial in own]
    curves = [Curve("trials", sorted(points[1:]), "rest", is_line=False)] if points[1:] else []
    name = f"trial {own[0].number}" + (", the best" if own[0] is trials[0] else "")
    # The best trial is the first of the runs on the page: everywhere in its colour.
    curves.append(Curve(name, points[:1], colour(0), is_line=False))
    across = _axis_of_names(scale) if scale.names else _axis_of_numbers(scale, sorted({place for place, _ in points}))
    title = f"{metric} by {key}"
    return draw(Chart(title=title, x=key, curves=curves, may_be_log=True, across=across, names=scale.names))


def _axis_of_names(scale: Scale) -> Axis:
    ticks = tuple((float(place), escaped(name, 16)) for place, name in enumerate(scale.names[:_MOST_NAMES]))
    return Axis(scale.low - 0.5, scale.high + 0.5, ticks)


def _axis_of_numbers(scale: Scale, tried: Sequence[float]) -> Axis | None:
    """Give the axis of numbers in their order; None: an ordinary one."""
    if not 1 < len(tried) <= _MOST_NUMBERS:
        return logarithmic(scale.low, scale.high) if scale.is_log else None
    at = [math.log10(value) if scale.is_log else value for value in tried]
    margin = 0.05 * (at[-1] - at[0])
    labels = [f"{value:.3g}" if abs(value) < 1000 else short(value) for value in tried]
    return Axis(at[0] - margin, at[-1] + margin, tuple(zip(at, labels, strict=True)), scale.is_log)
