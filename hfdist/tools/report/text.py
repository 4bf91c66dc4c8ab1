"""Values of a run's files as safe HTML, numbers and times: a file may say anything."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import datetime

from hfdist.errors import printable
from hfdist.secrets import mask_secrets

LONGEST = 300
"""Characters of a text in a line, unless a caller says otherwise."""
_LARGEST = 1e100
"""Largest number that is taken: sums and products of a few such numbers stay finite."""


def escaped(value: object, longest: int = LONGEST) -> str:
    """Give a value as HTML text in one line, cut to `longest` characters; it may stand in a double-quoted attribute."""
    return html.escape(printable(str(value), longest))


def escaped_lines(value: object, longest: int) -> str:
    """Give a text as HTML that keeps its lines, cut to `longest` characters."""
    # Secrets are masked before the text is split and cut: one may have several lines, or lie at the cut. Twice the
    # length is enough for that; the text may be a file's whole content.
    text = mask_secrets(str(value)[: 2 * longest])
    shown = "\n".join(html.escape(printable(line)) for line in text[:longest].split("\n"))
    return f"{shown} ..." if len(text) > longest else shown


def number(value: object) -> float | None:
    """Give a value of a file as a number; None: it is no number, not finite, or above 1e100."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # NaN is not below anything.
    if not abs(value) <= _LARGEST:
        return None
    # Ratios of so small a number would not be finite.
    return float(value) if abs(value) >= 1 / _LARGEST else 0.0


def numbers(value: object) -> list[float | None]:
    """Give the items of a list in a file as numbers; empty: the value is no list."""
    return [number(item) for item in value] if isinstance(value, list) else []


def instant(value: object) -> datetime | None:
    """Give a value of a file as a time; None: it is no time in ISO format, or has no time zone."""
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return None if found.tzinfo is None else found


def wide_table(titles: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Give a table as HTML; on a narrow screen each cell has its column's title.

    Args:
        titles: the titles of all columns but the first, in the page's own words.
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
