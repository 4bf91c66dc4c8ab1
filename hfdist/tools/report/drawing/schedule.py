"""A picture of the recorded step of a pipeline: a row a rank, a box for each action."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.tools.report.drawing.axis import linear
from hfdist.tools.report.drawing.frame import TOP, frame, labels_below
from hfdist.tools.report.reading.timeline import Span
from hfdist.units import count, share

COMPUTE = ("forward", "backward", "backward_input", "backward_weight")
"""Kinds of actions in which a rank computes; in the others it sends or waits."""
_WORDS = {
    "forward": "forward",
    "backward": "full backward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradient",
    "send": "send",
    "wait": "wait to receive",
}
"""Names of the kinds of actions in the legend, in its order."""
_MOST_BOXES = 2000
_ROW = 26
"""Height of a row, in pixels."""
_MOST_RANKS = 64
_MOST_IN_WORDS = 8
"""Most ranks whose busy time is said in words."""
_LEAST_WIDTH = 0.035
"""Share of the step from which on a box has room for a number on any screen."""


def draw(spans: Sequence[Span]) -> str:
    """Give the picture as HTML, or an empty text if there are no spans."""
    spans = [span for span in spans if span.kind in _WORDS]
    if not spans:
        return ""
    ranks = sorted({span.rank for span in spans})[:_MOST_RANKS]
    rows = {rank: row for row, rank in enumerate(ranks)}
    shown = _choose_shown([span for span in spans if span.rank in rows])
    last_ms = max(span.start_ms + span.length_ms for span in spans) or 1.0
    height = _ROW * len(ranks)
    busy = busy_share(spans)
    idle = 1 - sum(busy.values()) / len(busy)
    words = f"{count(len(busy), 'rank')}, {last_ms:.1f} ms, {share(idle)} idle"
    kinds = [kind for kind in _WORDS if any(span.kind == kind for span in shown)]
    across = linear(0, last_ms, from_zero=True, fits=False)
    boxes = "".join(_boxes([span for span in shown if span.kind == kind], kind, rows) for kind in kinds)
    inner = (
        f'<svg class="data" y="{TOP}" width="100%" height="{height}" viewBox="0 0 {last_ms:.4f} {len(ranks)}" '
        f'preserveAspectRatio="none">{boxes}</svg>{_numbers(shown, rows, last_ms)}{labels_below(across, height)}'
    )
    left_out = "" if len(shown) == len(spans) else f" {len(spans) - len(shown):,} actions are not drawn."
    legend = "".join(f'<li class="a-{kind}"><i></i>{_WORDS[kind]}</li>' for kind in kinds)
    return (
        f'<figure class="chart"><h3>Schedule of a step <small>{words}</small></h3><ul class="legend">{legend}</ul>'
        + frame(
            labels=[(TOP + _ROW * (row + 0.5), f"{rank}") for rank, row in rows.items()],
            inner=inner,
            height=height,
            words=("Schedule of a step", f"{words}. {_busy_words(busy)}"),
            data={"form": "boxes"},
        )
        + f'<p class="axis">ms; a row is a rank</p><p><small>{_busy_words(busy)}{left_out}</small></p></figure>'
    )


def busy_share(spans: Sequence[Span]) -> dict[int, float]:
    """Give the share of the schedule in which each rank computes, from 0 to 1, by rank.

    Actions of a rank that overlap count once: each counts from where the ones before have ended.
    """
    first_ms = min(span.start_ms for span in spans)
    last_ms = max(span.start_ms + span.length_ms for span in spans)
    ranks = sorted({span.rank for span in spans})
    busy_ms, reached_ms = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, first_ms)
    for span in sorted(spans, key=lambda span: span.start_ms):
        if span.kind in COMPUTE:
            start_ms, stop_ms = max(span.start_ms, reached_ms[span.rank]), span.start_ms + span.length_ms
            busy_ms[span.rank] += max(stop_ms - start_ms, 0.0)
            reached_ms[span.rank] = max(stop_ms, reached_ms[span.rank])
    # A step of actions without length has no length, either.
    length_ms = (last_ms - first_ms) or 1.0
    return {rank: busy / length_ms for rank, busy in busy_ms.items()}


def _choose_shown(spans: Sequence[Span]) -> list[Span]:
    """Give the spans that are drawn: all, or the first ones that compute, of each rank, where all are too many."""
    compute = [span for span in spans if span.kind in COMPUTE]
    if len(spans) > _MOST_BOXES:
        return sorted(compute, key=lambda span: span.start_ms)[:_MOST_BOXES]
    return compute + [span for span in spans if span.kind not in COMPUTE]


def _busy_words(busy: dict[int, float]) -> str:
    named = ", ".join(f"rank {rank} {share(value)}" for rank, value in list(busy.items())[:_MOST_IN_WORDS])
    more = " ..." if len(busy) > _MOST_IN_WORDS else ""
    return f"Busy: {named}{more}."


def _boxes(spans: Sequence[Span], kind: str, rows: dict[int, int]) -> str:
    """Draw all actions of one kind as one path; a row is 1 high, and sends and waits are lower boxes in its middle."""
    top, height = (0.08, 0.84) if kind in COMPUTE else (0.3, 0.4)
    d = "".join(
        f"M{span.start_ms:.6g} {rows[span.rank] + top:g}h{span.length_ms:.6g}v{height}h-{span.length_ms:.6g}z"
        for span in spans
    )
    microbatches = ",".join("" if span.microbatch is None else str(span.microbatch) for span in spans)
    return f'<path class="box a-{kind}" data-label="{_WORDS[kind]}" data-microbatches="{microbatches}" d="{d}"/>'


def _numbers(spans: Sequence[Span], rows: dict[int, int], last_ms: float) -> str:
    """Write the number of the micro batch into each box that has room for it."""
    drawn = []
    for span in spans:
        is_wide = span.length_ms > _LEAST_WIDTH * last_ms
        if span.kind in COMPUTE and span.microbatch is not None and is_wide:
            middle = 100 * (span.start_ms + span.length_ms / 2) / last_ms
            y = TOP + _ROW * (rows[span.rank] + 0.5) + 4
            drawn.append(f'<text class="middle inside" x="{middle:.2f}%" y="{y:.0f}">{span.microbatch}</text>')
    return "".join(drawn)
