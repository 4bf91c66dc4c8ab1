"""The recorded step of a pipeline, as the spans of the Chrome trace that a run writes."""

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
    microbatch: int | None
    start_ms: float
    length_ms: float


def read_spans(path: Path) -> list[Span]:
    """Read a Chrome trace; events that are no spans are left out."""
    events = read_object(path).get("traceEvents")
    found = [_to_span(event) for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    return sorted((span for span in found if span is not None), key=lambda span: (span.rank, span.start_ms))


def _to_span(event: Mapping[str, object]) -> Span | None:
    rank, start, length = (number(event.get(key)) for key in ("tid", "ts", "dur"))
    kind, args = event.get("cat"), event.get("args")
    if event.get("ph") != "X" or not isinstance(kind, str) or rank is None or start is None or length is None:
        return None
    microbatch = number(args.get("microbatch")) if isinstance(args, dict) else None
    # At the left edge, by the clock of a GPU, rounding gives a little less than zero.
    whole = None if microbatch is None else int(microbatch)
    return Span(int(rank), kind, whole, max(start, 0.0) / 1e3, max(length, 0.0) / 1e3)
