"""The part of a report about a run's plan: planned and measured figures, item by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, number, wide_table
from hfdist.units import duration, energy, share, short, size

_MOST_ITEMS = 40
_OF_MEMORY = ("weights", "gradients", "optimizer", "activations", "buffers", "runtime")
_LARGE_ERROR = 0.15


def plan(run: RunFiles) -> str:
    """Give the planned figures, beside the measured ones once the run has ended."""
    graded = run.grade.get("items")
    rows = list(_graded(graded)) if isinstance(graded, list) else []
    titles: tuple[str, ...] = ("planned", "measured", "error")
    if not rows:
        rows, titles = list(_planned(run.plan)), ("planned",)
    if not rows:
        return ""
    advice = _text(run.plan, "advice")
    words = "".join(f"<p>{escaped(text)}</p>" for text in (_words(run.plan), advice and f"Try {advice}") if text)
    return f"<h2>Plan</h2>{words}{wide_table(titles, rows)}"


def _words(content: Mapping[str, object]) -> str:
    layout, hardware, binds = (_text(content, key) for key in ("layout", "hardware", "binds"))
    if not layout:
        return ""
    fits = "It fits" if content.get("fits") is True else "It does not fit"
    return f"{layout}, on {hardware}. {fits}; a step is bound by: {binds}."


def _graded(items: Sequence[object]) -> Iterator[tuple[str, list[str]]]:
    for item in items[:_MOST_ITEMS]:
        if not isinstance(item, dict):
            continue
        predicted, measured, error = (number(item.get(key)) for key in ("predicted", "measured", "error"))
        name, unit = _text(item, "name"), _text(item, "unit")
        if predicted is None or measured is None or not name:
            continue
        off = "" if error is None else f"{100 * error:+.0f} %"
        shown = f"<strong>{off}</strong>" if error is not None and abs(error) > _LARGE_ERROR else off
        yield name, [_value(predicted, unit), _value(measured, unit), shown]


def _planned(content: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    memory, time = content.get("memory"), content.get("time")
    use = memory.get("use") if isinstance(memory, dict) else None
    for name in _OF_MEMORY:
        if isinstance(use, dict) and (value := number(use.get(name))):
            yield name, [size(value)]
    for name in ("compute", "bubble"):
        if isinstance(time, dict) and (value := number(time.get(name))):
            yield f"{name} of a step", [duration(value)]
    for key, name, unit in (
        ("tokens_per_second", "speed", "tokens a second"),
        ("mfu", "MFU", ""),
        ("cost", "cost", _text(content, "currency") or "of an unknown currency"),
        ("kwh", "energy", "kWh"),
    ):
        if (value := number(content.get(key))) is not None:
            yield name, [_value(value, unit)]


def _text(content: Mapping[str, object], key: str) -> str:
    value = content.get(key)
    return value if isinstance(value, str) else ""


def _value(value: float, unit: str) -> str:
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
