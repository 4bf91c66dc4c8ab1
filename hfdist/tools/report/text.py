"""Values as a reader sees them. All text in files of a run is of unknown origin, and leaves here escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from hfdist.errors import printable
from hfdist.secrets import mask_secrets

LONGEST = 300
"""Characters of a text in a line."""
_LARGEST = 1e100


def escaped(value: object, longest: int = LONGEST) -> str:
    """Give a value as HTML text, in one line: also for attributes in double quotes."""
    return html.escape(printable(str(value), longest))


def escaped_lines(value: object, longest: int) -> str:
    """Give a text as HTML that keeps its lines."""
    # A secret may have several lines, or lie where the text is cut; and the text may be a file's whole content.
    text = mask_secrets(str(value)[: 2 * longest])
    lines = "\n".join(html.escape(printable(line)) for line in text[:longest].split("\n"))
    return lines + (" ..." if len(text) > longest else "")


def number(value: object) -> float | None:
    """Give a number of a file; None: it is none, or not finite, or so large that sums of it might not be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        return None
    return float(value) if abs(value) >= 1 / _LARGEST else 0.0


def numbers(value: object) -> list[float | None]:
    """Give the numbers of a list in a file."""
    return [number(item) for item in value] if isinstance(value, list) else []


def instant(value: Any) -> datetime | None:
    """Give the time of a file; None: it is none."""
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
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
