"""A picture of a run's events over time: a row with a bar for each start, and a row of ticks for each kind of event.

running    [== start 1 ==]..[===== start 2 =====]     .. a pause, which is drawn short
saves          |    |           |    |    |
"""

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
_ALL_PAUSES = 0.3
"""Share of the time line that all pauses may take together."""
_ROW = 18
"""Height of a row, in pixels."""


class _TimedEvent(NamedTuple):
    """An event with its time."""

    event: Mapping[str, object]
    when: datetime


def time_line(run: RunFiles) -> str:
    """Give the picture as HTML, or an empty text if no event has a time."""
    times = [(event, instant(event.get("time"))) for event in run.events]
    timed = [_TimedEvent(event, when) for event, when in times if when is not None]
    if not timed:
        return ""
    spans = _spans(timed, run)
    words = f"{count(len(timed), 'event')} of {count(len(spans), 'start')}: the table has them in words."
    spans = spans[-_MOST_STARTS:]
    timed = [one for one in timed if one.when >= spans[0].first]
    place = _placing(spans)
    kinds = dict.fromkeys(style_of(event).name for event, _ in timed if not is_of(event, Event.start, Event.end))
    names = list(kinds)[:_MOST_KINDS]
    rows = ["running", *names]
    inner = [_bars(spans, place), *(_ticks(timed, name, row, place) for row, name in enumerate(names, 1))]
    height = _ROW * len(rows)
    labels = [(TOP + _ROW * row + _ROW / 2, name) for row, name in enumerate(rows)]
    data = {"form": "none"}
    drawn = frame(labels=labels, inner="".join(inner), height=height, words=("Events by time", words), data=data)
    return f'<figure class="chart">{_HEAD}{drawn}</figure>'


class _Span(NamedTuple):
    """The time in which a start of the run has events."""

    first: datetime
    last: datetime
    start: object
    """Number of the start, as the file says it."""
    end: Mapping[str, object] | None
    """The event of the start's end; None: it runs."""


def _spans(timed: Sequence[_TimedEvent], run: RunFiles) -> list[_Span]:
    """Give all starts by their time; the last one reaches to where the run's record was last written."""
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
    """Give a function from a time to its share of the time line, from 0 to 1; a time in a pause lies at its end."""
    pause = min(_LONGEST_PAUSE, _ALL_PAUSES / len(spans))
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
    """Draw each start as a bar in the first row."""
    drawn = []
    for first, last, start, end in spans:
        words = "running" if end is None else style_of(end).words(end)
        kind = "bar bad" if end is not None and is_bad(end) else "bar"
        text = escaped(f"start {start}: {first:%Y-%m-%d %H:%M:%S}, {duration((last - first).total_seconds())}; {words}")
        # Even a start of a moment can be seen, and pointed at.
        x, width = 100 * place(first), 100 * max(place(last) - place(first), 0.003)
        drawn.append(
            f'<rect class="{kind}" data-text="{text}" x="{x:.2f}%" width="{width:.2f}%" y="{TOP + 3}" height="12"/>'
        )
    return "".join(drawn)


def _ticks(timed: Sequence[_TimedEvent], name: str, row: int, place: Callable[[datetime], float]) -> str:
    """Draw the events of a kind as ticks in a row; events near each other share the tick of the last of them."""
    groups: dict[int, list[_TimedEvent]] = {}
    for one in timed:
        if style_of(one.event).name == name:
            groups.setdefault(int(_MOST_TICKS * place(one.when)), []).append(one)
    drawn = []
    for group in groups.values():
        event, when = group[-1]
        words = f"{when:%H:%M:%S}: {style_of(event).words(event)}"
        if len(group) > 1:
            words += f"; and {len(group) - 1} more near it"
        kind = "tick bad" if is_bad(event) else "tick"
        x, y = 100 * place(when), TOP + _ROW * row + _ROW // 2
        drawn.append(f'<circle class="{kind}" data-text="{escaped(words)}" cx="{x:.2f}%" cy="{y}" r="5"/>')
    return "".join(drawn)
