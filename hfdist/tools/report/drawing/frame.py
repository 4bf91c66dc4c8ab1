"""The frame of a drawing: what keeps its size while the inner part is stretched to the page's width.

label |  TOP     letters of marks
label |  height  the inner part
      |  BOTTOM  labels of the x axis
"""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.tools.report.drawing.axis import Axis
from hfdist.tools.report.text import escaped

TOP, BOTTOM = 20, 22
"""Pixels above the inner part, for letters of marks, and below it, for the labels of x."""
_WIDE = 8
"""Labels get more room if the longest one has more characters than this."""
_EDGE = 0.04
"""Share of the x axis at each end where a label would leave the drawing: its text lies inside of its place."""


def frame(
    *, labels: Sequence[tuple[float, str]], inner: str, height: float, words: tuple[str, str], data: dict[str, str]
) -> str:
    """Give a drawing as HTML, with labels on its left.

    Args:
        labels: the height of each label, in pixels from the top, and its text, of unknown origin.
        inner: SVG elements.
        height: pixels of the inner part, without TOP and BOTTOM.
        words: title and description, of unknown origin.
        data: values of the attributes `data-NAME` for the script, by name, escaped.
    """
    total = height + TOP + BOTTOM
    # A text stands on its `y`: 4 pixels lower, the middle of its letters is there.
    texts = "".join(f'<text x="100%" y="{y + 4:.1f}">{escaped(label, 24)}</text>' for y, label in labels)
    longest = max((len(label) for _, label in labels), default=0)
    wide = " wide" if longest > _WIDE else ""
    attributes = "".join(f' data-{name}="{value}"' for name, value in data.items())
    title, description = words
    named = f"<title>{escaped(title)}</title><desc>{escaped(description, 1000)}</desc>"
    return (
        f'<div class="frame{wide}"><svg class="labels" height="{total:.0f}" aria-hidden="true">{texts}</svg>'
        f'<svg class="plot" height="{total:.0f}" role="img" tabindex="0"{attributes}>{named}{inner}</svg></div>'
    )


def labels_below(across: Axis, height: float) -> str:
    """Give the labels of an x axis as SVG, below an inner part of `height` pixels."""
    texts = []
    for value, label in across.ticks:
        share = (value - across.low) / across.width
        side = "middle"
        if share < _EDGE:
            side = "start"
        elif share > 1 - _EDGE:
            side = "end"
        texts.append(f'<text class="{side}" x="{across.place(value)}" y="{height + TOP + 16:.0f}">{label}</text>')
    return "".join(texts)
