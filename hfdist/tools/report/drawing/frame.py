"""The frame of a drawing: labels on its left, outside of the part that is stretched, and the labels of an x axis."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.tools.report.drawing.axis import Axis
from hfdist.tools.report.text import escaped

TOP, BOTTOM = 20, 22
"""Pixels above the curves, for letters of marks, and below them, for the labels of x."""
_WIDE = 8
"""Characters of the longest label from which on the labels get more room."""
_EDGE = 0.04
"""Share of the x axis at each end in which labels are moved inside."""


def frame(
    *, labels: Sequence[tuple[float, str]], inner: str, height: float, words: tuple[str, str], data: dict[str, str]
) -> str:
    """Give a drawing as HTML, with labels on its left, each at a height in pixels.

    Args:
        labels: heights and texts of unknown origin.
        inner: SVG elements.
        height: pixels of the inner part, without TOP and BOTTOM.
        words: title and description, of unknown origin.
        data: attributes `data-...` for the script, escaped.
    """
    total = height + TOP + BOTTOM
    texts = "".join(f'<text x="100%" y="{y + 4:.1f}">{escaped(label, 24)}</text>' for y, label in labels)
    longest = max((len(label) for _, label in labels), default=0)
    wide = " wide" if longest > _WIDE else ""
    attributes = "".join(f' data-{name}="{value}"' for name, value in data.items())
    named = f"<title>{escaped(words[0])}</title><desc>{escaped(words[1], 1000)}</desc>"
    return (
        f'<div class="frame{wide}"><svg class="labels" height="{total:.0f}" aria-hidden="true">{texts}</svg>'
        f'<svg class="plot" height="{total:.0f}" role="img" tabindex="0"{attributes}>{named}{inner}</svg></div>'
    )


def labels_below(across: Axis, height: float) -> str:
    """Give the labels of an x axis below a part of that height in pixels; those at its ends stay inside."""
    texts = []
    for value, label in across.ticks:
        share = (value - across.low) / across.width
        side = "start" if share < _EDGE else "end" if share > 1 - _EDGE else "middle"
        texts.append(f'<text class="{side}" x="{across.place(value)}" y="{height + TOP + 16:.0f}">{label}</text>')
    return "".join(texts)
