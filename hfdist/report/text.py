"""Values as a reader sees them. All text in files of a run is of unknown origin, and leaves here escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from hfdist.errors import printable

LONGEST = 300
"""Characters of a text in a line."""
_LARGEST = 1e100


def escaped(value: object, longest: int = LONGEST) -> str:
    """Give a value as HTML text, in one line: also for attributes in double quotes."""
    return html.escape(printable(str(value), longest))


def escaped_lines(value: object, longest: int) -> str:
    """Give a text as HTML that keeps its lines."""
    return "\n".join(html.escape(printable(line)) for line in str(value)[:longest].split("\n")) + (
        " ..." if len(str(value)) > longest else ""
    )


def number(value: Any) -> float | None:
    """Give a number of a file; None: it is none, or not finite, or so large that sums of it might not be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        return None
    return float(value) if abs(value) >= 1 / _LARGEST else 0.0


def numbers(value: Any) -> list[float | None]:
    """Give the numbers of a list in a file."""
    return [number(item) for item in value] if isinstance(value, list) else []


def instant(value: Any) -> datetime | None:
    """Give the time of a file; None: it is none."""
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return None if found.tzinfo is None else found


def energy_unit(most_kwh: float) -> tuple[float, str]:
    """Give the factor from kWh, and the unit, in which energy up to so much is read most easily."""
    return (1.0, "kWh") if most_kwh >= 1 else (1e3, "Wh")


def short(value: float) -> str:
    """Give a number with about three digits, such as `1.23 M` or `0.0453`."""
    size = abs(value)
    for unit, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            factor = 1e3 if word == "k" else unit
            return f"{_digits(value / factor)} {word}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < size < 1e-3 else _digits(value)


def _digits(value: float) -> str:
    size = abs(value)
    decimals = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 1 else 4
    return f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """Give a duration, such as `3 h 12 min` or `81 ms`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s" if seconds < 600 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def size(num_bytes: float) -> str:
    """Give bytes, such as `1.6 MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.{0 if num_bytes >= 100 * 1024**power else 1}f} {unit}"
    return f"{num_bytes:.0f} bytes"


def share(value: float) -> str:
    """Give a share from 0 to 1 in percent."""
    return f"{100 * value:.{0 if value >= 0.1 or value == 0 else 1}f} %"


def wide_table(titles: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Give a table as HTML; on a narrow screen each cell has its column's title.

    Args:
        titles: of all columns but the first, in the page's own words.
        rows: a name of unknown origin, and cells of HTML.
    """
    heads = "".join(f"<th>{title}</th>" for title in ("", *titles))
    lines = (
        f"<tr><th>{escaped(name, 80)}</th>"
        + "".join(f'<td data-title="{title}">{cell}</td>' for title, cell in zip(titles, cells, strict=True))
        + "</tr>"
        for name, cells in rows
    )
    return f'<table class="wide"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def count(number_of: int, word: str) -> str:
    """Give `1 save` or `2 saves`."""
    return f"{number_of:,} {word}{'' if number_of == 1 else 's'}"
