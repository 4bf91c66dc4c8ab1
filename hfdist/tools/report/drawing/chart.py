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
"""Least height of a view box that browsers draw, in the unit of the data."""
_MOST_NAMES, _LONGEST_NAME = 8, 40
"""Most names in place of numbers of x, and most characters of each."""
_MOST_POINTS = 640
"""Most points of all curves of a chart together."""
_LEAST_POINTS = 48
"""Points that a curve may have even if a chart has many curves."""
_MOST_DOTS = 60
"""A dotted curve with more points than this is drawn without dots."""
COLOURS = 6
"""Number of colours of the page's style, for curves and for runs."""
_LOG_RANGE = 40.0
"""The y axis is logarithmic if the highest value is more than this many times the lowest."""


@dataclass(frozen=True)
class Curve:
    """A curve with its points."""

    label: str
    """Name of the curve, of any origin: it is escaped here."""
    points: Sequence[Point]
    """Points in the order of x."""
    colour: str = "c0"
    """Class of the page's style: c0, c1 ..."""
    is_dotted: bool = False
    """Whether each point has a dot on the line, if the points are few."""
    is_line: bool = True
    """Whether a line joins the points; else each point is a dot alone."""


@dataclass(frozen=True)
class Mark:
    """An event at an x: a line with a letter."""

    x: float
    letter: str
    text_id: str
    """Id of the element of the page that has the text."""
    is_bad: bool
    colour: str = ""
    """Colour of the mark's run, where a page has several; empty: the page has one run."""


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
    """The x axis, with escaped labels; None: the axis is found from the points."""
    names: Sequence[str] = ()
    """A few short names, of unknown origin, that stand for x = 0, 1 ...; empty: x is a number."""


def colour(number: int) -> str:
    """Give the style's class for the colour of a run or a curve, by its number; the first COLOURS of them differ."""
    return f"c{number % COLOURS}"


def draw(chart: Chart) -> str:
    """Give the chart as HTML, or an empty text if no curve has a value."""
    values = [y for curve in chart.curves for _, y in curve.points if y is not None]
    if not values:
        return ""
    across = _x_axis(chart)
    up = _y_axis(chart, values)
    words = _describe(chart)
    data = _for_script(chart, across, up)
    if not up.is_log and up.width < _SMALLEST_HEIGHT:
        # A learning rate of 1e-6, for example: the box gets the height of a number from 1 to 10.
        scale = 10.0 ** floor(log10(up.width))
        chart, up = _divided(chart, scale), _divided_axis(up, scale)
        data["scale"] = f"{scale:g}"
    unit = f" <small>{escaped(chart.unit)}</small>" if chart.unit else ""
    inner = (_grid(chart, up), labels_below(across, chart.height), _plot(chart, across, up), _marks(chart, across))
    body = frame(
        labels=[(_height(chart, up, value), label) for value, label in up.ticks],
        inner="".join(inner),
        height=chart.height,
        words=(chart.title, words),
        data=data,
    )
    head = f"<h3>{escaped(chart.title)}{unit}</h3>{_legend(chart)}"
    return f'<figure class="chart">{head}{body}<p class="axis">{escaped(chart.x)}</p></figure>'


def _divided(chart: Chart, scale: float) -> Chart:
    """Give the chart with the y of all points divided by a scale."""
    curves = [
        replace(curve, points=[(x, None if y is None else y / scale) for x, y in curve.points])
        for curve in chart.curves
    ]
    return replace(chart, curves=curves)


def _divided_axis(up: Axis, scale: float) -> Axis:
    """Give an axis with its values divided by a scale, and with the labels that it had."""
    ticks = tuple((value / scale, label) for value, label in up.ticks)
    return replace(up, low=up.low / scale, high=up.high / scale, ticks=ticks)


def _for_script(chart: Chart, across: Axis, up: Axis) -> dict[str, str]:
    """Give what the page's script must know to write the values of a point."""
    flags = {"log": up.is_log, "logx": across.is_log, "stacked": chart.is_stacked}
    data = {"x": escaped(chart.x), "form": chart.form} | {name: str(int(flag)) for name, flag in flags.items()}
    if chart.names:
        # Each name is cut, and not the JSON, which the script must read.
        listed = json.dumps([name[:_LONGEST_NAME] for name in chart.names[:_MOST_NAMES]])
        data["names"] = escaped(listed, len(listed))
    return data


def _path(points: Sequence[Point]) -> str:
    """Give the `d` of a line through points, with a gap where there is no y."""
    parts, is_drawing = [], False
    for x, y in points:
        if y is not None:
            parts.append(f"{'' if is_drawing else 'M'}{_digits(x)} {_digits(y)}")
        is_drawing = y is not None
    return " ".join(parts)


def _dots(points: Sequence[Point]) -> str:
    """Give the `d` of dots: a line without length is its round ends alone, and a dot is not stretched."""
    return "".join(f"M{_digits(x)} {_digits(y)}h0" for x, y in points if y is not None)


def _x_axis(chart: Chart) -> Axis:
    if chart.across is not None:
        return chart.across
    places = [x for curve in chart.curves for x, _ in curve.points]
    # A run that goes on from the checkpoint of another one begins far from 0.
    begins_near_zero = min(places) < 0.3 * max(places)
    return linear(min(places), max(places), from_zero=begins_near_zero, num_ticks=4, fits=False)


def _y_axis(chart: Chart, values: list[float]) -> Axis:
    low, high = min(values), max(values)
    if chart.may_be_log and low >= 0 and high > 0:
        lowest_above_zero = min(value for value in values if value > 0)
        if high / lowest_above_zero > _LOG_RANGE:
            return logarithmic(lowest_above_zero, high)
    return linear(low, high, from_zero=chart.from_zero)


def _height(chart: Chart, up: Axis, value: float) -> float:
    """Give the pixels from the top of the drawing to a value of y."""
    return TOP + chart.height * (1 - (value - up.low) / up.width)


def _grid(chart: Chart, up: Axis) -> str:
    heights = (f"{_height(chart, up, value):.1f}" for value, _ in up.ticks)
    return '<g class="grid">' + "".join(f'<line x2="100%" y1="{y}" y2="{y}"/>' for y in heights) + "</g>"


def _plot(chart: Chart, across: Axis, up: Axis) -> str:
    """Draw the curves in a box whose unit is the data's; y grows downwards in SVG, so that all is turned over."""
    box = f"{_digits(across.low)} {_digits(-up.high)} {_digits(across.width)} {_digits(up.width)}"
    curves = chart.curves
    if across.is_log:
        curves = [replace(curve, points=[(log10(x), y) for x, y in curve.points]) for curve in curves]
    most = max(_MOST_POINTS // len(curves), _LEAST_POINTS)
    drawn = "".join(_area(curve) if chart.is_stacked else _line(curve, up, most) for curve in curves)
    return (
        f'<svg class="data" y="{TOP}" width="100%" height="{chart.height}" viewBox="{box}" preserveAspectRatio="none">'
        f'<g transform="scale(1 -1)">{drawn}</g></svg>'
    )


def _area(curve: Curve) -> str:
    """Draw all points of a curve, with the area below it, down to 0."""
    ends = [x for x, y in curve.points if y is not None]
    down_and_back = f"V0H{_digits(ends[0])}Z" if ends else ""
    return f'<path class="area {curve.colour}" {_label(curve)} d="{_path(curve.points)}{down_and_back}"/>'


def _line(curve: Curve, up: Axis, most: int) -> str:
    """Draw a curve as a line of at most `most` points, with dots, or as dots alone."""
    points, colour, label = curve.points, curve.colour, _label(curve)
    if up.is_log:
        points = [(x, _logarithm(y, up)) for x, y in points]
    if not curve.is_line:
        return f'<path class="dots {colour}" {label} d="{_dots(points)}"/>'
    kept = keep_extremes(points, most)
    if curve.is_dotted:
        dots = _dots(kept) if len(kept) <= _MOST_DOTS else ""
        return f'<path class="line {colour}" {label} d="{_path(kept)}"/><path class="dots {colour}" d="{dots}"/>'
    if len(points) <= most // 2:
        return f'<path class="line {colour}" {label} d="{_path(kept)}"/>'
    # Many noisy points look like a band: a line of their means shows where it goes.
    band = f'<path class="faint {colour}" {label} d="{_path(kept)}"/>'
    return f'{band}<path class="line {colour}" d="{_path(means(points, most // 6))}"/>'


def _logarithm(y: float | None, up: Axis) -> float | None:
    """Give the logarithm of a y; 0 has none, such as a gradient's, and lies at the lower edge."""
    if y is None:
        return None
    return log10(y) if y > 0 else up.low


def _label(curve: Curve) -> str:
    return f'data-label="{escaped(curve.label)}"'


def _marks(chart: Chart, across: Axis) -> str:
    bottom, drawn = TOP + chart.height, []
    for mark in chart.marks:
        if across.low <= mark.x <= across.high:
            x = across.place(mark.x)
            kind = f"mark {mark.colour or 'alone'}"
            if mark.is_bad:
                kind += " bad"
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
    """Say in words what the chart shows, for readers who do not see it."""
    parts = []
    for curve in chart.curves:
        known = [y for _, y in curve.points if y is not None]
        if known:
            first, last, lowest, highest = map(short, (known[0], known[-1], min(known), max(known)))
            parts.append(f"{curve.label}: from {first} to {last}; lowest {lowest}, highest {highest}")
    return f"{'; '.join(parts)}. On the x axis: {chart.x}."


def _digits(value: float) -> str:
    """Write a coordinate with 6 digits; a large number is written whole, as 1e+06 would round its last digits away."""
    text = f"{value:.6g}"
    is_large = "e" in text and abs(value) >= 1
    return f"{value:.0f}" if is_large else text
