"""Charts of a sweep's metric over each key that it has varied: a dot a trial, the best trial in its own colour."""

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
"""Most names that are labels of an axis."""
_MOST_NUMBERS = 6
"""Up to this many different numbers of a key are themselves the labels of its axis."""


def draw_by_value(trials: Sequence[Trial], metric: str) -> str:
    """Draw a chart for each key as HTML.

    Args:
        trials: trials with a value of the metric, the best first.
        metric: name of the metric.
    """
    drawn = "".join(_chart(key, trials, metric) for key in swept_keys(trials))
    return f'<div class="charts small">{drawn}</div>'


def _chart(key: str, trials: Sequence[Trial], metric: str) -> str:
    with_key = [trial for trial in trials if trial.values.get(key) is not None]
    if not with_key:
        return ""
    scale = Scale.of(key, [trial.values[key] for trial in with_key])
    best_point, *points = [(scale.place(trial.values[key]), trial.value) for trial in with_key]
    curves = [Curve("trials", sorted(points), "rest", is_line=False)] if points else []
    # The best trial of all need not have this key.
    best = with_key[0]
    name = f"trial {best.number}, the best" if best is trials[0] else f"trial {best.number}"
    # It has the colour of the page's first run, which it is.
    curves.append(Curve(name, [best_point], colour(0), is_line=False))
    if scale.names:
        across: Axis | None = _axis_of_names(scale)
    else:
        across = _axis_of_numbers(scale, sorted({x for x, _ in (best_point, *points)}))
    title = f"{metric} by {key}"
    return draw(Chart(title=title, x=key, curves=curves, may_be_log=True, across=across, names=scale.names))


def _axis_of_names(scale: Scale) -> Axis:
    ticks = tuple((float(place), escaped(name, 16)) for place, name in enumerate(scale.names[:_MOST_NAMES]))
    return Axis(scale.low - 0.5, scale.high + 0.5, ticks)


def _axis_of_numbers(scale: Scale, tried: Sequence[float]) -> Axis | None:
    """Give an axis for the values that trials have tried, in their order; None: a chart's own axis suits them.

    A few values are the labels themselves, so that a reader sees what was tried.
    """
    if not 1 < len(tried) <= _MOST_NUMBERS:
        return logarithmic(scale.low, scale.high) if scale.is_log else None
    places = [math.log10(value) if scale.is_log else value for value in tried]
    labels = [f"{value:.3g}" if abs(value) < 1000 else short(value) for value in tried]
    first, last = places[0], places[-1]
    margin = 0.05 * (last - first)
    return Axis(first - margin, last + margin, tuple(zip(places, labels, strict=True)), scale.is_log)
