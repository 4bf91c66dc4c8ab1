"""A sweep as parallel coordinates: an upright axis for each key and for the metric, and a line a trial across them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.records.trials import Trial
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.swept import Scale, swept_keys
from hfdist.tools.report.text import escaped
from hfdist.units import short

_WIDTH, _HEIGHT = 1000, 320
"""Size of the picture, in the unit of its view box."""
_TOP, _BOTTOM, _SIDE = 24, 34, 70
"""Margins around the axes: for the names below them, and for the values beside them."""
_GOOD_SHARE = 0.25
"""Share of the trials whose lines are not faint, the best ones."""

_METRIC = ""
"""Stands for the metric among the keys."""


def draw_lines(trials: Sequence[Trial], metric: str) -> str:
    """Draw trials with a value of the metric, the best first; nothing for fewer than two keys: a chart has it all."""
    keys = swept_keys(trials)
    if len(keys) < 2:
        return ""
    scales = [Scale.of(key, [trial.values[key] for trial in trials if key in trial.values]) for key in keys]
    scales.append(Scale.of(metric, [trial.value for trial in trials]))
    places = [_SIDE + place * (_WIDTH - 2 * _SIDE) / (len(scales) - 1) for place in range(len(scales))]
    axes_by_key = dict(zip([*keys, _METRIC], zip(places, scales, strict=True), strict=True))
    lines = [
        _line(trial, axes_by_key, is_best=rank == 0, is_good=rank < _GOOD_SHARE * len(trials))
        for rank, trial in enumerate(trials)
    ]
    axes = "".join(_axis(x, name, scale) for x, name, scale in zip(places, [*keys, metric], scales, strict=True))
    words = f"Each line is a trial, over its values and {escaped(metric)}; the best one is blue."
    words += " Those that are not in the best quarter are faint."
    # The best is drawn last, on top of the others.
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}" font-size="13" '
        f'fill="currentColor">{"".join(reversed(lines))}{axes}</svg><p class="axis">{words}</p></figure>'
    )


def _line(trial: Trial, axes: Mapping[str, tuple[float, Scale]], *, is_best: bool, is_good: bool) -> str:
    """Draw a trial over the axes of its keys and of the metric."""
    values = trial.values | {_METRIC: trial.value}
    # A trial need not have all keys, and a value may be null.
    points = " ".join(
        f"{x:.1f},{_up(scale.share(values[key])):.1f}" for key, (x, scale) in axes.items() if key in values
    )
    look = f'class="line {colour(0) if is_best else "rest"}"' + ("" if is_good else ' opacity="0.3"')
    return f'<polyline {look} points="{points}"><title>trial {trial.number}</title></polyline>'


def _axis(x: float, name: str, scale: Scale) -> str:
    low, high = short(scale.low), short(scale.high)
    if scale.names:
        low, high = escaped(scale.names[0], 16), escaped(scale.names[-1], 16)
    return (
        f'<g class="grid"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_up(0)}" y2="{_up(1)}"/></g>'
        f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escaped(name, 28)}</text>'
        f'<text x="{x + 4:.1f}" y="{_up(0) + 12}">{low}</text><text x="{x + 4:.1f}" y="{_up(1) - 6}">{high}</text>'
    )


def _up(share: float) -> float:
    """Give the y of a share of an axis, from 0 at the bottom to 1 at the top."""
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
