"""A sweep on the page of its trials: each trial as a line over its values and its metric, and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hfdist.records.trials import NOTES, SETTINGS, Trial, TrialLog, rank_trials
from hfdist.tools.report.drawing.axis import Axis, logarithmic
from hfdist.tools.report.drawing.chart import Chart, Curve, colour, draw
from hfdist.tools.report.text import escaped, number
from hfdist.units import count, short

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _SIDE = 1000, 320, 24, 34, 70
_MOST_AXES, _MOST_LINES, _MOST_ROWS = 8, 300, 100
_MOST_NAMED_TICKS = 8
_MOST_TICKS = 6
_RATE = ".lr"
_LOG_RANGE = 30.0
"""Values whose largest is so many times the smallest are drawn by their logarithms."""


def read_trials(folder: Path) -> list[Trial]:
    """Read the trials of a sweep, the best first; where they have several lengths, the furthest first."""
    settings = _settings(folder)
    sign = -1 if settings.get("direction") == "maximize" else 1
    has_lengths = settings.get("rungs", 1) != 1 or settings.get("sampler") == "pbt"
    trials = TrialLog(folder).trials
    for trial in trials:
        trial.results = [
            replace(one, tokens=int(number(one.tokens) or 0), value=number(one.value)) for one in trial.results
        ]
    return rank_trials(trials, sign=sign, has_lengths=has_lengths)


def sweep(folder: Path) -> str:
    """Give the part of the page; nothing, if there are no trials."""
    trials, settings = read_trials(folder), _settings(folder)
    if not trials:
        return ""
    metric = str(settings.get("metric", "metric"))
    failed = sum(bool(trial.failure) for trial in trials)
    words = f"{count(len(trials), 'trial')}, {failed} failed, {escaped(settings.get('sampler', ''))}"
    best, found = trials[0], ""
    if best.value is not None:
        values = f"<code>{escaped(_overrides(best))}</code>"
        found = f"<p>Best: trial {best.number}, {escaped(metric)} {short(best.value)}: {values}</p>"
    notes = settings.get(NOTES)
    items = "".join(
        f"<li>{escaped(text, 500)}</li>" for text in (notes if isinstance(notes, list) else [])[:_MOST_AXES]
    )
    found += f'<ul class="findings">{items}</ul>' if items else ""
    drawn = f"{_by_value(trials, metric)}{_draw(trials, metric)}"
    return f"<h2>Sweep <small>{words}</small></h2>{found}{drawn}{_table(trials, metric)}"


def _settings(folder: Path) -> dict[str, object]:
    try:
        content = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _overrides(trial: Trial) -> str:
    return " ".join(f"{key}={value}" for key, value in trial.values.items())


def _table(trials: Sequence[Trial], metric: str) -> str:
    has_rungs = any(len(trial.results) > 1 for trial in trials)
    has_parents = any(trial.parent is not None for trial in trials)
    rows = []
    for trial in trials[:_MOST_ROWS]:
        cells = {
            "trial": f"{trial.number}",
            metric: escaped(trial.failure or "", 60) if trial.value is None else short(trial.value),
            "tokens": short(trial.tokens),
        }
        if has_rungs:
            cells["rungs"] = f"{len(trial.results)}"
        if has_parents:
            cells["begins at"] = "" if trial.parent is None else f"trial {trial.parent}"
        cells["values"] = escaped(_overrides(trial))
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells.values())}</tr>")
    heads = "".join(f"<th>{escaped(title, 40)}</th>" for title in cells)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="words">{body}</table></div>'


def _by_value(trials: Sequence[Trial], metric: str) -> str:
    """Give the metric over each swept value: a dot a trial, and the best one in its own colour."""
    shown = [trial for trial in trials if trial.value is not None][:_MOST_LINES]
    if len(shown) < 2:
        return ""
    drawn = "".join(_chart(key, shown, metric) for key in _swept(shown))
    return f'<div class="charts small">{drawn}</div>'


def _swept(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(key for trial in trials for key in trial.values))[:_MOST_AXES]


def _chart(key: str, trials: Sequence[Trial], metric: str) -> str:
    own = [trial for trial in trials if trial.values.get(key) is not None]
    if not own:
        return ""
    found = [number(trial.values[key]) for trial in own]
    places = [value for value in found if value is not None]
    names: list[str] = []
    across = None
    if len(places) < len(own):
        names = sorted({str(trial.values[key]) for trial in own})
        places = [float(names.index(str(trial.values[key]))) for trial in own]
        ticks = tuple((float(place), escaped(name, 16)) for place, name in enumerate(names))
        across = Axis(-0.5, len(names) - 0.5, ticks[:_MOST_NAMED_TICKS])
    else:
        across = _numbers(key, places)
    points = [(place, trial.value) for place, trial in zip(places, own, strict=True)]
    curves = [Curve("trials", sorted(points[1:]), "rest", is_line=False)] if points[1:] else []
    name = f"trial {own[0].number}" + (", the best" if own[0] is trials[0] else "")
    # The best trial is the first of the runs on the page: everywhere in its colour.
    curves.append(Curve(name, points[:1], colour(0), is_line=False))
    title = f"{metric} by {key}"
    return draw(Chart(title=title, x=key, curves=curves, may_be_log=True, across=across, names=names))


def _numbers(key: str, places: Sequence[float]) -> Axis | None:
    """Give the axis of swept numbers; few ones are its labels; None: an ordinary one."""
    tried, is_log = sorted({*places}), _is_logarithmic(key, min(places), max(places))
    if not 1 < len(tried) <= _MOST_TICKS:
        return logarithmic(tried[0], tried[-1]) if is_log else None
    at = [math.log10(value) if is_log else value for value in tried]
    margin = 0.05 * (at[-1] - at[0])
    ticks = tuple(
        (place, f"{value:.3g}" if abs(value) < 1000 else short(value)) for place, value in zip(at, tried, strict=True)
    )
    return Axis(at[0] - margin, at[-1] + margin, ticks, is_log)


def _is_logarithmic(key: str, low: float, high: float) -> bool:
    return low > 0 and (key.endswith(_RATE) or high / low >= _LOG_RANGE)


class _Axis:
    """One of the parallel axes: a key, or the metric."""

    def __init__(self, name: str, values: Sequence[object]) -> None:
        self.name = name
        found = [number(value) for value in values]
        self._texts: list[str] | None = None
        if any(value is None for value in found):
            self._texts = sorted({str(value) for value in values})
            return
        numbers = [value for value in found if value is not None]
        self._low, self._high = min(numbers), max(numbers)
        self._is_log = _is_logarithmic(name, self._low, self._high)

    def place(self, value: float) -> float:
        """From 0 at the bottom to 1 at the top."""
        if self._texts is not None:
            return self._texts.index(str(value)) / max(len(self._texts) - 1, 1)
        low, high, own = self._low, self._high, float(value)
        if self._is_log:
            low, high, own = math.log(low), math.log(high), math.log(own)
        return (own - low) / (high - low) if high > low else 0.5

    @property
    def ends(self) -> tuple[str, str]:
        """What stands at the bottom and at the top."""
        if self._texts is not None:
            return escaped(self._texts[0], 16), escaped(self._texts[-1], 16)
        return short(self._low), short(self._high)


def _draw(trials: Sequence[Trial], metric: str) -> str:
    """Parallel coordinates; nothing, if fewer than two trials have a value."""
    shown = [trial for trial in trials if trial.value is not None][:_MOST_LINES]
    keys = _swept(shown)
    # Of one key, the chart above says it.
    if len(shown) < 2 or len(keys) < 2:
        return ""
    axes = [_Axis(key, [trial.values[key] for trial in shown if key in trial.values]) for key in keys]
    axes.append(_Axis(metric, [trial.value for trial in shown]))
    across = (_WIDTH - 2 * _SIDE) / (len(axes) - 1)
    lines = []
    for rank, trial in reversed(list(enumerate(shown))):
        values = [*(trial.values.get(key) for key in keys), trial.value]
        points = " ".join(
            f"{_SIDE + across * place:.1f},{_up(axis.place(value)):.1f}"
            for place, (axis, value) in enumerate(zip(axes, values, strict=True))
            # A key that has no part in this trial.
            if value is not None
        )
        is_good = 4 * rank < len(shown)
        look = f'class="line {colour(0) if rank == 0 else "rest"}"' + ("" if is_good else ' opacity="0.3"')
        lines.append(f'<polyline {look} points="{points}"><title>trial {trial.number}</title></polyline>')
    marks = "".join(_mark(axis, _SIDE + across * place) for place, axis in enumerate(axes))
    words = f"Each line is a trial, over its values and {escaped(metric)}; blue is the best one, faint is no good one."
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}" font-size="13" '
        f'fill="currentColor">{"".join(lines)}{marks}</svg><p class="axis">{words}</p></figure>'
    )


def _mark(axis: _Axis, x: float) -> str:
    low, high = axis.ends
    return (
        f'<g class="grid"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_up(0)}" y2="{_up(1)}"/></g>'
        f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escaped(axis.name, 28)}</text>'
        f'<text x="{x + 4:.1f}" y="{_up(0) + 12}">{low}</text><text x="{x + 4:.1f}" y="{_up(1) - 6}">{high}</text>'
    )


def _up(place: float) -> float:
    return _TOP + (1 - place) * (_HEIGHT - _TOP - _BOTTOM)
