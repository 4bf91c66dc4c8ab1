"""The events of a run: in words, as marks in its curves, and on a time line with a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from hfdist.errors import printable
from hfdist.records import Event, State
from hfdist.tools.report.drawing.frame import TOP, frame
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import LONGEST, escaped, instant, number
from hfdist.units import count, duration, size

_MOST_OPEN, _MOST_ROWS = 12, 60
"""Most rows of the table of events: those that are seen at once, and all."""
_MOST_TEXTS = 4
"""Most texts of a mark."""
_MOST_TICKS = 60
"""Most ticks in a row of the time line."""
_MOST_STARTS = 40
_LONGEST_PAUSE = 0.03
"""Share of the time line that stands for the time between two starts, however long that was."""

_Timed = Sequence[tuple[Mapping[str, object], datetime]]
"""Events with their times."""


class EventStyle(NamedTuple):
    """How a kind of event is shown."""

    letter: str | None
    """Letter of its mark in the curves; None: it has no mark."""
    name: str
    """Name of its row in the time line."""
    is_bad: bool
    """Whether something went wrong."""
    words: Callable[[Mapping[str, object]], str]
    """Describes an event."""


def _step(event: Mapping[str, object], key: str = "step") -> str:
    found = number(event.get(key))
    return "?" if found is None else f"{found:,.0f}"


def _saved(event: Mapping[str, object]) -> str:
    parts = [f"saved step {_step(event)}"]
    if (num_bytes := number(event.get("bytes"))) is not None:
        parts.append(size(num_bytes))
    if (seconds := number(event.get("seconds"))) is not None:
        parts.append(f"in {duration(seconds)}")
    return " ".join([parts[0] + ":", *parts[1:]]) if parts[1:] else parts[0]


def _uploaded(event: Mapping[str, object]) -> str:
    newest = f"; its newest is step {_step(event, 'newest_step')}" if "newest_step" in event else ""
    ended = "had a failure" if event.get("failed") else f"sent {size(number(event.get('sent_bytes')) or 0)}"
    return f"the upload of step {_step(event)} to the mirror {ended}{newest}"


def _resumed(event: Mapping[str, object]) -> str:
    changes = event.get("changes")
    text = f"went on from {event.get('checkpoint', 'a checkpoint')}"
    return text + (f"; changed: {', '.join(map(str, changes))}" if isinstance(changes, list) and changes else "")


def _ended(event: Mapping[str, object]) -> str:
    error = event.get("error")
    code = "" if event.get("exit_code") is None else f", exit code {event.get('exit_code')}"
    text = f"ended: {event.get('state')}{code}, at step {_step(event)}"
    return f"{text}: {error}" if error else text


def _started(event: Mapping[str, object]) -> str:
    layout = event.get("layout")
    text = f"started on {event.get('host', '?')}"
    return f"{text}: {describe_layout(layout)}" if isinstance(layout, dict) else text


def _used_up(event: Mapping[str, object]) -> str:
    return f"the budget {event.get('which')} is used up: {event.get('used')} of {event.get('limit')}"


_STYLES = {
    Event.start: EventStyle(None, "starts", False, _started),
    Event.resume: EventStyle("R", "resumes", False, _resumed),
    Event.replica: EventStyle(
        None, "replicas", True, lambda e: f"passed over a replica in memory, at step {_step(e)}: {e.get('found', '')}"
    ),
    Event.save: EventStyle(None, "saves", False, _saved),
    Event.mirror: EventStyle(None, "uploads", False, _uploaded),
    Event.skip: EventStyle(
        "S", "skips", True, lambda e: f"step {_step(e)} was skipped: its loss or gradient was not finite"
    ),
    Event.rollback: EventStyle(
        "B", "rollbacks", True, lambda e: f"went back from step {_step(e)} to {_step(e, 'to_step')}"
    ),
    Event.alert: EventStyle(
        "A", "alerts", True, lambda e: f"{str(e.get('kind', 'alert')).replace('_', ' ')}: {e.get('text', '')}"
    ),
    Event.lost_rank: EventStyle("L", "lost ranks", True, lambda e: f"lost a rank: {e.get('found', '')}"),
    Event.budget: EventStyle("$", "budget", False, _used_up),
    Event.end: EventStyle("E", "ends", False, _ended),
}


_BY_NAME = {event.value: style for event, style in _STYLES.items()}


def describe_layout(layout: Mapping[str, object]) -> str:
    """Give the degrees of the axes that are used, and the sharding."""
    # Without sharding, its axis only replicates.
    names = {"shard": "data"} if layout.get("sharding") == "none" else {}
    degrees = [f"{names.get(axis, axis)} {degree}" for axis, degree in layout.items() if _is_used(degree)]
    sharding = [f"sharding {layout['sharding']}"] if layout.get("sharding") else []
    return ", ".join([*(degrees or ["one rank"]), *sharding])


def _is_used(degree: object) -> bool:
    return isinstance(degree, int) and degree != 1


def style_of(event: Mapping[str, object]) -> EventStyle:
    """Find how an event is shown; an event of a later hfdist is shown by its name."""
    name = str(event.get("event"))
    return _BY_NAME.get(name) or EventStyle(None, name, False, lambda e: f"{name}, step {_step(e)}")


def is_bad(event: Mapping[str, object]) -> bool:
    """Whether something went wrong."""
    ended_badly = event.get("state") in (State.failed.value, State.lost.value)
    return style_of(event).is_bad or (_is(event, Event.end) and ended_badly)


def events_of(run: RunFiles, kind: Event) -> list[Mapping[str, object]]:
    """Give the events of a kind."""
    return [event for event in run.events if _is(event, kind)]


def _is(event: Mapping[str, object], *kinds: Event) -> bool:
    return event.get("event") in [kind.value for kind in kinds]


class Marked(NamedTuple):
    """Events at about one step, as one mark in all curves."""

    step: float
    letters: str
    text: str
    """Text of unknown origin."""
    is_bad: bool


def marked(run: RunFiles, most: int) -> list[Marked]:
    """Give about `most` marks at most; a good end has none. Events near each other share a mark."""
    found = []
    for event, step in _with_steps(run):
        letter = style_of(event).letter
        if letter is not None and (not _is(event, Event.end) or is_bad(event)):
            text = f"step {step:,.0f}: {style_of(event).words(event)}"
            found.append(Marked(step, letter, printable(text, LONGEST), is_bad(event)))
    found.sort(key=lambda mark: mark.step)
    groups: list[list[Marked]] = []
    for mark in found:
        if groups and mark.step - groups[-1][0].step < max([found[-1].step, *run.steps[-1:]]) / most:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [_join(own) for own in groups]


def _join(marks: list[Marked]) -> Marked:
    letters = "".join(dict.fromkeys(mark.letters for mark in marks))
    texts = list(dict.fromkeys(mark.text for mark in marks))
    more = [f"and {len(texts) - _MOST_TEXTS} more near it"] if len(texts) > _MOST_TEXTS else []
    text = "\n".join([*texts[:_MOST_TEXTS], *more])
    return Marked(marks[0].step, letters, text, any(mark.is_bad for mark in marks))


def _with_steps(run: RunFiles) -> Iterator[tuple[Mapping[str, object], float]]:
    """Give events with their steps; an event without a step gets the one at which its start ended."""
    ends = {repr(e.get("start")): number(e.get("step")) for e in events_of(run, Event.end)}
    last = 0.0
    for event in run.events:
        step = number(event.get("step"))
        if step is None:
            step = ends.get(repr(event.get("start")))
        last = last if step is None else step
        yield event, last


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
    inside = [event for event, _ in timed if not _is(event, Event.start, Event.end)]
    names = list(dict.fromkeys(style_of(event).name for event in inside))[:12]
    rows = ["running", *names]
    inner = [_bars(spans, place), *(_row(timed, name, row + 1, place) for row, name in enumerate(names))]
    labels = [(TOP + 18 * row + 9, name) for row, name in enumerate(rows)]
    data = {"form": "none"}
    return (
        f'<figure class="chart">{_TIME_HEAD}'
        + frame(labels=labels, inner="".join(inner), height=18 * len(rows), words=("Events by time", words), data=data)
        + "</figure>"
    )


_TIME_HEAD = "<h3>Events by time <small>pauses between starts are shortened</small></h3>"


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
        end = event if _is(event, Event.end) else span.end
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


def table(run: RunFiles) -> str:
    """Give the events in words, the newest first, without saves, which have a table of their own, and their uploads."""
    events = [event for event in reversed(run.events) if not _is(event, Event.save) and not _is(event, Event.mirror)]
    left_out = f"<p>{len(events) - _MOST_ROWS:,} earlier ones are in events.jsonl.</p>" if events[_MOST_ROWS:] else ""
    more = _rows(events[_MOST_OPEN:_MOST_ROWS])
    folded = f'<details id="events-more"><summary>earlier events</summary>{more}{left_out}</details>' if more else ""
    return _rows(events[:_MOST_OPEN]) + folded


def _rows(events: Sequence[Mapping[str, object]]) -> str:
    lines = []
    for event in events:
        when = instant(event.get("time"))
        shown = "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}"
        bad = ' class="bad"' if is_bad(event) else ""
        words = escaped(style_of(event).words(event), 500)
        lines.append(f"<tr{bad}><td>{shown}</td><td>{escaped(event.get('start', ''), 12)}</td><td>{words}</td></tr>")
    head = "<tr><th>time (UTC)</th><th>start</th><th>what</th></tr>"
    return f'<table class="words events"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>' if lines else ""
