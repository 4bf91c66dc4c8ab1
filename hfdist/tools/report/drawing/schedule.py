"""The recorded step of a pipeline: a row a rank, a box for each action."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.tools.report.drawing.axis import linear
from hfdist.tools.report.drawing.frame import TOP, frame, labels_below
from hfdist.tools.report.reading.timeline import Span
from hfdist.units import count, share

COMPUTE = ("forward", "backward", "backward_input", "backward_weight")
_WORDS = {
    "forward": "forward",
    "backward": "full backward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradient",
    "send": "send",
    "wait": "wait to receive",
}
_MOST_BOXES = 2000
_ROW = 26
_MOST_RANKS = 64


def draw(spans: Sequence[Span]) -> str:
    """Give the picture as HTML; nothing, if there are no spans."""
    spans = [span for span in spans if span.kind in _WORDS]
    if not spans:
        return ""
    ranks = sorted({span.rank for span in spans})[:_MOST_RANKS]
    row = {rank: number for number, rank in enumerate(ranks)}
    shown = [span for span in spans if span.rank in row and span.kind in COMPUTE]
    other = [span for span in spans if span.rank in row and span.kind not in COMPUTE]
    if len(shown) + len(other) <= _MOST_BOXES:
        shown += other
    else:
        # The first in time: each rank has its own.
        shown = sorted(shown, key=lambda span: span.start_ms)[:_MOST_BOXES]
    last = max(span.start_ms + span.length_ms for span in spans) or 1.0
    height = _ROW * len(ranks)
    busy = busy_share(spans)
    idle = 1 - sum(busy.values()) / len(busy)
    words = f"{count(len(busy), 'rank')}, {last:.1f} ms, {share(idle)} idle"
    kinds = [kind for kind in _WORDS if any(span.kind == kind for span in shown)]
    across = linear(0, last, from_zero=True, fits=False)
    boxes = "".join(_boxes([span for span in shown if span.kind == kind], kind, row) for kind in kinds)
    inner = (
        f'<svg class="data" y="{TOP}" width="100%" height="{height}" viewBox="0 0 {last:.4f} {len(ranks)}" '
        f'preserveAspectRatio="none">{boxes}</svg>{_numbers(shown, row, last)}{labels_below(across, height)}'
    )
    left_out = "" if len(shown) == len(spans) else f" {len(spans) - len(shown):,} actions are not drawn."
    legend = "".join(f'<li class="a-{kind}"><i></i>{_WORDS[kind]}</li>' for kind in kinds)
    return (
        f'<figure class="chart"><h3>Schedule of a step <small>{words}</small></h3><ul class="legend">{legend}</ul>'
        + frame(
            labels=[(TOP + _ROW * (number + 0.5), f"{rank}") for rank, number in row.items()],
            inner=inner,
            height=height,
            words=("Schedule of a step", f"{words}. {_busy_words(busy)}"),
            data={"form": "boxes"},
        )
        + f'<p class="axis">ms; a row is a rank</p><p><small>{_busy_words(busy)}{left_out}</small></p></figure>'
    )


def busy_share(spans: Sequence[Span]) -> dict[int, float]:
    """Give the share of the schedule in which each rank computes, from 0 to 1; what overlaps counts once."""
    first = min(span.start_ms for span in spans)
    last = max(span.start_ms + span.length_ms for span in spans)
    busy = dict.fromkeys(sorted({span.rank for span in spans}), 0.0)
    reached: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.start_ms):
        if span.kind in COMPUTE:
            stop = span.start_ms + span.length_ms
            busy[span.rank] += max(stop - max(span.start_ms, reached.get(span.rank, first)), 0.0)
            reached[span.rank] = max(stop, reached.get(span.rank, first))
    return {rank: length / ((last - first) or 1.0) for rank, length in busy.items()}


def _busy_words(busy: dict[int, float]) -> str:
    shown = ", ".join(f"rank {rank} {share(value)}" for rank, value in list(busy.items())[:8])
    return f"Busy: {shown}{' ...' if len(busy) > 8 else ''}."


def _boxes(spans: Sequence[Span], kind: str, row: dict[int, int]) -> str:
    top, height = (0.08, 0.84) if kind in COMPUTE else (0.3, 0.4)
    d = "".join(
        f"M{span.start_ms:.6g} {row[span.rank] + top:g}h{span.length_ms:.6g}v{height}h-{span.length_ms:.6g}z"
        for span in spans
    )
    microbatches = ",".join("" if span.microbatch is None else str(span.microbatch) for span in spans)
    return f'<path class="box a-{kind}" data-label="{_WORDS[kind]}" data-microbatches="{microbatches}" d="{d}"/>'


def _numbers(spans: Sequence[Span], row: dict[int, int], last: float) -> str:
    """Write the micro batch into boxes that are wide enough on any screen."""
    wide = [s for s in spans if s.kind in COMPUTE and s.microbatch is not None and s.length_ms > 0.035 * last]
    return "".join(
        f'<text class="middle inside" x="{100 * (span.start_ms + span.length_ms / 2) / last:.2f}%" '
        f'y="{TOP + _ROW * (row[span.rank] + 0.5) + 4:.0f}">{span.microbatch}</text>'
        for span in wide
    )
