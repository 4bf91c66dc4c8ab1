"""The part of the page about a run's plan: a table of planned figures, beside the measured ones after the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, number, wide_table
from hfdist.units import duration, energy, share, short, size

_MOST_ITEMS = 40
"""Most rows of a graded plan: a file may have any number of items."""
_MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "runtime")
_LARGE_ERROR = 0.15
"""A relative error above this stands out."""

_Row = tuple[str, list[str]]
"""Name of a figure and the cells of its row."""


def plan(run: RunFiles) -> str:
    """Give the part as HTML, or an empty text if the run has no plan.

    It has the planned figures, and beside them the measured ones and their error once the run has ended.
    """
    items = run.grade.get("items")
    rows = list(_graded_rows(items)) if isinstance(items, list) else []
    titles = ["planned", "measured", "error"]
    if not rows:
        rows, titles = list(_planned_rows(run.plan)), ["planned"]
    if not rows:
        return ""
    texts, advice = [_summary(run.plan)], _text(run.plan, "advice")
    if advice:
        texts.append(f"Try {advice}")
    words = "".join(f"<p>{escaped(text)}</p>" for text in texts if text)
    return f"<h2>Plan</h2>{words}{wide_table(titles, rows)}"


def _summary(content: Mapping[str, object]) -> str:
    layout, hardware, binds = (_text(content, key) for key in ("layout", "hardware", "binds"))
    if not layout:
        return ""
    fits = "It fits" if content.get("fits") is True else "It does not fit"
    return f"{layout}, on {hardware}. {fits}; a step is bound by: {binds}."


def _graded_rows(items: Sequence[object]) -> Iterator[_Row]:
    """Give a row for each item of a grade, with the planned and the measured value and the relative error."""
    for item in items[:_MOST_ITEMS]:
        if not isinstance(item, dict):
            continue
        predicted, measured, error = (number(item.get(key)) for key in ("predicted", "measured", "error"))
        name, unit = _text(item, "name"), _text(item, "unit")
        if predicted is None or measured is None or not name:
            continue
        percent = "" if error is None else f"{100 * error:+.0f} %"
        if error is not None and abs(error) > _LARGE_ERROR:
            percent = f"<strong>{percent}</strong>"
        yield name, [_value(predicted, unit), _value(measured, unit), percent]


def _planned_rows(content: Mapping[str, object]) -> Iterator[_Row]:
    """Give a row for each figure of a plan that the file has: memory, time, speed, cost and energy."""
    memory, time = _object(content, "memory"), _object(content, "time")
    used_bytes = _object(memory, "use")
    for name in _MEMORY_PARTS:
        if value := number(used_bytes.get(name)):
            yield name, [size(value)]
    for name in ("compute", "bubble"):
        if value := number(time.get(name)):
            yield f"{name} of a step", [duration(value)]
    for key, name, unit in (
        ("tokens_per_second", "speed", "tokens a second"),
        ("mfu", "MFU", ""),
        ("cost", "cost", _text(content, "currency") or "of an unknown currency"),
        ("kwh", "energy", "kWh"),
    ):
        if (value := number(content.get(key))) is not None:
            yield name, [_value(value, unit)]


def _object(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _text(content: Mapping[str, object], key: str) -> str:
    value = content.get(key)
    return value if isinstance(value, str) else ""


def _value(value: float, unit: str) -> str:
    """Write a value in a unit, as escaped HTML; a value without a unit is a share."""
    match unit:
        case "bytes":
            return size(value)
        case "seconds":
            return duration(value)
        case "kWh":
            return energy(value)
        case "":
            return share(value)
        case _:
            return f"{short(value)} {escaped(unit, 40)}"
