"""The recorded step of a pipeline: its actions, read from the Chrome trace that a run writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hfdist.tools.report.reading.json_file import read_object
from hfdist.tools.report.text import number


class Span(NamedTuple):
    """An action of a rank in the recorded step of a pipeline."""

    rank: int
    kind: str
    """Kind of the action, such as `forward`, `send` or `wait`."""
    microbatch: int | None
    """Number of the micro batch; None: the trace does not say it."""
    start_ms: float
    """Milliseconds from the beginning of the step."""
    length_ms: float


def read_spans(path: Path) -> list[Span]:
    """Read the spans of a Chrome trace, by rank and start; other events, and damaged ones, are left out."""
    events = read_object(path).get("traceEvents")
    if not isinstance(events, list):
        return []
    found = [_to_span(event) for event in events if isinstance(event, dict)]
    return sorted((span for span in found if span is not None), key=lambda span: (span.rank, span.start_ms))


def _to_span(event: Mapping[str, object]) -> Span | None:
    """Give a trace's event as a span; None: it is none."""
    if event.get("ph") != "X":  # X is a complete event, which has a start and a duration, in microseconds.
        return None
    rank, start, duration = number(event.get("tid")), number(event.get("ts")), number(event.get("dur"))
    kind, arguments = event.get("cat"), event.get("args")
    if not isinstance(kind, str) or rank is None or start is None or duration is None:
        return None
    microbatch = number(arguments.get("microbatch")) if isinstance(arguments, dict) else None
    return Span(
        rank=int(rank),
        kind=kind,
        microbatch=None if microbatch is None else int(microbatch),
        # The clock of a GPU is rounded: the first action may begin a little below zero.
        start_ms=max(start, 0.0) / 1e3,
        length_ms=max(duration, 0.0) / 1e3,
    )
