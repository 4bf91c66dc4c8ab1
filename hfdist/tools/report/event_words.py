"""The events of a run in words, and a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hfdist.records import Event, State
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, instant, number
from hfdist.units import duration, size

_MOST_OPEN, _MOST_ROWS = 12, 60
"""Most rows of the table of events: those that are seen at once, and all."""


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
    return style_of(event).is_bad or (is_of(event, Event.end) and ended_badly)


def events_of(run: RunFiles, kind: Event) -> list[Mapping[str, object]]:
    """Give the events of a kind."""
    return [event for event in run.events if is_of(event, kind)]


def is_of(event: Mapping[str, object], *kinds: Event) -> bool:
    """Whether an event is of one of these kinds."""
    return event.get("event") in [kind.value for kind in kinds]


def table(run: RunFiles) -> str:
    """Give the events in words, the newest first, without saves, which have a table of their own, and their uploads."""
    events = [event for event in reversed(run.events) if not is_of(event, Event.save, Event.mirror)]
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
