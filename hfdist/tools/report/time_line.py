"""The events of a run on a line of time: starts as bars, and other events as ticks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from hfdist.records import Event
from hfdist.tools.report.drawing.frame import TOP, frame
from hfdist.tools.report.event_words import is_bad, is_of, style_of
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, instant
from hfdist.units import count, duration

_MOST_TICKS = 60
"""Most ticks in a row of the time line."""
_MOST_STARTS = 40
"""Most starts, the newest ones."""
_MOST_KINDS = 12
"""Most rows of other events."""
_HEAD = "<h3>Events by time <small>pauses between starts are shortened</small></h3>"
_LONGEST_PAUSE = 0.03
"""Share of the time line that stands for the time between two starts, however long that was."""

_Timed = Sequence[tuple[Mapping[str, object], datetime]]
"""Events with their times."""


def time_line(run: RunFiles) -> str:
    """Draw starts as bars and other events as ticks, a row for each kind, over the time in which the run ran."""
    timed = [(event, when) for event in run.events if (when := instant(event.get("time"))) is not None]
    if not timed:
        return ""
    spans = _spans(timed, run)
    words = f"{count(len(timed), 'event')} of {count(len(spans), 'start')}: the table has them in words."
    spans = spans[-_MOST_STARTS:]
    timed = [(event, when) for event, when in timed if when >= spans[0].first]
    place = _placing(spans)
    inside = [event for event, _ in timed if not is_of(event, Event.start, Event.end)]
    names = list(dict.fromkeys(style_of(event).name for event in inside))[:_MOST_KINDS]
    rows = ["running", *names]
    inner = [_bars(spans, place), *(_row(timed, name, row + 1, place) for row, name in enumerate(names))]
    labels = [(TOP + 18 * row + 9, name) for row, name in enumerate(rows)]
    data = {"form": "none"}
    return (
        f'<figure class="chart">{_HEAD}'
        + frame(labels=labels, inner="".join(inner), height=18 * len(rows), words=("Events by time", words), data=data)
        + "</figure>"
    )


class _Span(NamedTuple):
    """The time in which a start ran."""

    first: datetime
    last: datetime
    start: object
    """Its number."""
    end: Mapping[str, object] | None
    """The event of its end; None: it runs."""


def _spans(timed: _Timed, run: RunFiles) -> list[_Span]:
    """Give all starts by their time."""
    spans: dict[str, _Span] = {}
    for event, when in timed:
        start = event.get("start")
        span = spans.get(repr(start), _Span(when, when, start, None))
        end = event if is_of(event, Event.end) else span.end
        spans[repr(start)] = _Span(min(span.first, when), max(span.last, when), start, end)
    found = sorted(spans.values(), key=lambda span: (span.first, span.last))
    updated = None if run.record is None else instant(run.record.updated)
    if updated is not None:
        found[-1] = found[-1]._replace(last=max(found[-1].last, updated))
    return found


def _placing(spans: Sequence[_Span]) -> Callable[[datetime], float]:
    """Give a function from a time to its share of the time line, from 0 to 1."""
    pause = min(_LONGEST_PAUSE, 0.3 / len(spans))
    lengths = [max((span.last - span.first).total_seconds(), 1e-3) for span in spans]
    scale = (1 - pause * (len(spans) - 1)) / sum(lengths)

    def place(when: datetime) -> float:
        passed = 0.0
        for span, length in zip(spans, lengths, strict=True):
            if when <= span.last:
                return min(passed + max((when - span.first).total_seconds(), 0.0) * scale, 1.0)
            passed += length * scale + pause
        return 1.0

    return place


def _bars(spans: Sequence[_Span], place: Callable[[datetime], float]) -> str:
    drawn = []
    for first, last, start, end in spans:
        words = "running" if end is None else style_of(end).words(end)
        kind = "bar bad" if end is not None and is_bad(end) else "bar"
        text = escaped(f"start {start}: {first:%Y-%m-%d %H:%M:%S}, {duration((last - first).total_seconds())}; {words}")
        x, width = 100 * place(first), 100 * max(place(last) - place(first), 0.003)
        drawn.append(
            f'<rect class="{kind}" data-text="{text}" x="{x:.2f}%" width="{width:.2f}%" y="{TOP + 3}" height="12"/>'
        )
    return "".join(drawn)


def _row(timed: _Timed, name: str, row: int, place: Callable[[datetime], float]) -> str:
    groups: dict[int, list[tuple[Mapping[str, object], datetime]]] = {}
    for event, when in timed:
        if style_of(event).name == name:
            groups.setdefault(int(_MOST_TICKS * place(when)), []).append((event, when))
    drawn = []
    for own in groups.values():
        (event, when), more = own[-1], f"; and {len(own) - 1} more near it" if own[1:] else ""
        text = escaped(f"{when:%H:%M:%S}: {style_of(event).words(event)}{more}")
        kind = "tick bad" if is_bad(event) else "tick"
        drawn.append(
            f'<circle class="{kind}" data-text="{text}" cx="{100 * place(when):.2f}%" cy="{TOP + 18 * row + 9}" r="5"/>'
        )
    return "".join(drawn)
