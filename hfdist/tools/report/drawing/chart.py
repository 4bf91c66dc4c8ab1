"""A chart of curves as inline SVG, as wide as its place, with letters of one size on every screen.

The part with the curves has a view box in the unit of the data and is stretched; labels and marks lie around it, at
places in percent. So a path's coordinates are the values, and the script needs no second copy of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Literal

from hfdist.tools.report.drawing.axis import Axis, linear, logarithmic
from hfdist.tools.report.drawing.frame import TOP, frame, labels_below
from hfdist.tools.report.reading.downsample import Point, keep_extremes, means
from hfdist.tools.report.text import escaped
from hfdist.units import short

_SMALLEST_HEIGHT = 1e-3
_MOST_NAMES, _LONGEST_NAME = 8, 40
"""Most names in place of numbers of x, and most characters of each."""
_MOST_POINTS = 640
"""Most points of all curves of a chart together."""
_MOST_DOTS = 60
"""Most points of a dotted curve that have dots."""
COLOURS = 6
_LOG_RANGE = 40.0
"""Ratio of the highest value to the lowest from which on the axis is logarithmic."""


@dataclass(frozen=True)
class Curve:
    """A curve with its points."""

    label: str
    """Name of the curve; it may be of unknown origin, and is escaped here."""
    points: Sequence[Point]
    colour: str = "c0"
    """Class of the page's style: c0, c1 ..."""
    is_dotted: bool = False
    """Whether each of its few points has a dot."""
    is_line: bool = True
    """Whether a line joins the points; else each is a dot, in the order of x."""


@dataclass(frozen=True)
class Mark:
    """An event at an x: a line with a letter."""

    x: float
    letter: str
    text_id: str
    """Id of the element of the page that has the text."""
    is_bad: bool
    colour: str = ""
    """Colour of its run, where there are several."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows, and how."""

    title: str
    curves: Sequence[Curve]
    x: str = "step"
    """What lies on the x axis, in words."""
    unit: str = ""
    """Unit of y, in words."""
    form: Literal["number", "share", "seconds"] = "number"
    """How the script writes y."""
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    """Whether the y axis has 0."""
    may_be_log: bool = False
    """Whether the y axis may be logarithmic."""
    is_stacked: bool = False
    """Whether each curve lies on top of the next one, and the area between them is its value."""
    height: int = 150
    """Height of the part with the curves, in pixels."""
    across: Axis | None = None
    """The x axis, whose labels are escaped; None: from the points."""
    names: Sequence[str] = ()
    """A few short names in place of the whole numbers of x, of unknown origin."""


def colour(number: int) -> str:
    """Give the class of the colour of a run; the first few differ."""
    return f"c{number % COLOURS}"


def draw(chart: Chart) -> str:
    """Give the chart as HTML; nothing, if no curve has a value."""
    values = [y for curve in chart.curves for _, y in curve.points if y is not None]
    if not values:
        return ""
    across = _horizontal(chart)
    up = _vertical(chart, values)
    words = _describe(chart)
    scale = 1.0
    if not up.is_log and up.width < _SMALLEST_HEIGHT:
        # Browsers draw nothing in so low a box, such as that of a learning rate of 1e-6.
        scale = 10.0 ** floor(log10(up.width))
        chart, up = _divided(chart, scale), _divided_axis(up, scale)
    head = f"<h3>{escaped(chart.title)}{f' <small>{escaped(chart.unit)}</small>' if chart.unit else ''}</h3>"
    body = frame(
        labels=[(_height(chart, up, value), label) for value, label in up.ticks],
        inner="".join(
            (_grid(chart, up), labels_below(across, chart.height), _plot(chart, across, up), _marks(chart, across))
        ),
        height=chart.height,
        words=(chart.title, words),
        data=_for_script(chart, across, up) | ({} if scale == 1 else {"scale": f"{scale:g}"}),
    )
    return f'<figure class="chart">{head}{_legend(chart)}{body}<p class="axis">{escaped(chart.x)}</p></figure>'


def _divided(chart: Chart, scale: float) -> Chart:
    curves = [
        replace(curve, points=[(x, None if y is None else y / scale) for x, y in curve.points])
        for curve in chart.curves
    ]
    return replace(chart, curves=curves)


def _divided_axis(up: Axis, scale: float) -> Axis:
    """Divide an axis; its labels stay."""
    ticks = tuple((value / scale, label) for value, label in up.ticks)
    return replace(up, low=up.low / scale, high=up.high / scale, ticks=ticks)


def _for_script(chart: Chart, across: Axis, up: Axis) -> dict[str, str]:
    flags = {"log": up.is_log, "logx": across.is_log, "stacked": chart.is_stacked}
    # Names are cut, and not their JSON, which the script must read.
    listed = json.dumps([name[:_LONGEST_NAME] for name in chart.names[:_MOST_NAMES]])
    names = {"names": escaped(listed, len(listed))} if chart.names else {}
    return {"x": escaped(chart.x), "form": chart.form} | {name: str(int(flag)) for name, flag in flags.items()} | names


def _path(points: Sequence[Point]) -> str:
    """Give the `d` of a line through points, with a gap where there is no y."""
    parts, is_drawing = [], False
    for x, y in points:
        if y is not None:
            parts.append(f"{'' if is_drawing else 'M'}{_short(x)} {_short(y)}")
        is_drawing = y is not None
    return " ".join(parts)


def _horizontal(chart: Chart) -> Axis:
    if chart.across is not None:
        return chart.across
    places = [x for curve in chart.curves for x, _ in curve.points]
    # A run that goes on from the checkpoint of another one begins far from 0.
    begins = min(places) < 0.3 * max(places)
    return linear(min(places), max(places), from_zero=begins, num_ticks=4, fits=False)


def _vertical(chart: Chart, values: list[float]) -> Axis:
    low, high = min(values), max(values)
    if chart.may_be_log and low >= 0 and high > 0:
        low = min(value for value in values if value > 0)
        if high / low > _LOG_RANGE:
            return logarithmic(low, high)
    return linear(min(values), high, from_zero=chart.from_zero)


def _height(chart: Chart, up: Axis, value: float) -> float:
    return TOP + chart.height * (1 - (value - up.low) / up.width)


def _grid(chart: Chart, up: Axis) -> str:
    heights = (f"{_height(chart, up, value):.1f}" for value, _ in up.ticks)
    return '<g class="grid">' + "".join(f'<line x2="100%" y1="{y}" y2="{y}"/>' for y in heights) + "</g>"


def _plot(chart: Chart, across: Axis, up: Axis) -> str:
    box = f"{_short(across.low)} {_short(-up.high)} {_short(across.width)} {_short(up.width)}"
    most = _MOST_POINTS // len(chart.curves)
    curves = chart.curves
    if across.is_log:
        curves = [replace(curve, points=[(log10(x), y) for x, y in curve.points]) for curve in curves]
    lines = "".join(_line(chart, curve, up, max(most, 48)) for curve in curves)
    return (
        f'<svg class="data" y="{TOP}" width="100%" height="{chart.height}" viewBox="{box}" preserveAspectRatio="none">'
        f'<g transform="scale(1 -1)">{lines}</g></svg>'
    )


def _line(chart: Chart, curve: Curve, up: Axis, most: int) -> str:
    label = f'data-label="{escaped(curve.label)}"'
    if chart.is_stacked:
        top = _path(curve.points)
        ends = [x for x, y in curve.points if y is not None]
        closed = f"V0H{_short(ends[0])}Z" if ends else ""
        return f'<path class="area {curve.colour}" {label} d="{top}{closed}"/>'
    points: Sequence[Point] = curve.points
    if up.is_log:
        # A gradient may be 0: that lies at the lower edge.
        points = [(x, None if y is None else log10(y) if y > 0 else up.low) for x, y in points]
    # A line without length has round ends: a dot that is not stretched.
    if not curve.is_line:
        dots = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in points if y is not None)
        return f'<path class="dots {curve.colour}" {label} d="{dots}"/>'
    if curve.is_dotted:
        kept = keep_extremes(points, most)
        dotted = kept if len(kept) <= _MOST_DOTS else []
        dots = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in dotted if y is not None)
        line = _path(kept)
        return f'<path class="line {curve.colour}" {label} d="{line}"/><path class="dots {curve.colour}" d="{dots}"/>'
    is_noisy = len(points) > most // 2
    kind = "faint" if is_noisy else "line"
    drawn = f'<path class="{kind} {curve.colour}" {label} d="{_path(keep_extremes(points, most))}"/>'
    # Many noisy points look like a band: a line of their means shows where it goes.
    return drawn + (f'<path class="line {curve.colour}" d="{_path(means(points, most // 6))}"/>' if is_noisy else "")


def _marks(chart: Chart, across: Axis) -> str:
    bottom, drawn = TOP + chart.height, []
    for mark in chart.marks:
        if across.low <= mark.x <= across.high:
            x, kind = across.place(mark.x), f"mark {mark.colour or 'alone'}{' bad' if mark.is_bad else ''}"
            drawn.append(
                f'<g class="{kind}" data-from="{mark.text_id}"><line x1="{x}" x2="{x}" y1="{TOP - 4}" y2="{bottom}"/>'
                f'<text x="{x}" y="{TOP - 8}">{mark.letter}</text></g>'
            )
    return "".join(drawn)


def _legend(chart: Chart) -> str:
    if len(chart.curves) < 2:
        return ""
    items = (f'<li class="{curve.colour}"><i></i>{escaped(curve.label, 60)}</li>' for curve in chart.curves)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _describe(chart: Chart) -> str:
    parts = []
    for curve in chart.curves:
        known = [y for _, y in curve.points if y is not None]
        if known:
            words = (
                f"from {short(known[0])} to {short(known[-1])}; lowest {short(min(known))}, highest {short(max(known))}"
            )
            parts.append(f"{curve.label}: {words}")
    return f"{'; '.join(parts)}. On the x axis: {chart.x}."


def _short(value: float) -> str:
    text = f"{value:.6g}"
    return text if "e" not in text or abs(value) < 1 else f"{value:.0f}"
