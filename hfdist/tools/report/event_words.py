"""How each kind of event is shown, as words, a letter and a row, and the table of a run's events in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hfdist.records import Event, State
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, instant, number
from hfdist.units import duration, size

_MOST_OPEN, _MOST_ROWS = 12, 60
"""Most rows of the table that are seen at once, and most rows of the table."""


class EventStyle(NamedTuple):
    """How a kind of event is shown."""

    letter: str | None
    """Letter of such an event's mark in the curves; None: such events have no mark."""
    name: str
    """Name of the kind's row in the time line."""
    is_bad: bool
    """Whether something went wrong."""
    words: Callable[[Mapping[str, object]], str]
    """Function that gives an event in words, of unknown origin."""


def _step(event: Mapping[str, object], key: str = "step") -> str:
    """Write the step that an event has under a key."""
    step = number(event.get(key))
    return "?" if step is None else f"{step:,.0f}"


def _saved(event: Mapping[str, object]) -> str:
    details = []
    if (num_bytes := number(event.get("bytes"))) is not None:
        details.append(size(num_bytes))
    if (seconds := number(event.get("seconds"))) is not None:
        details.append(f"in {duration(seconds)}")
    saved = f"saved step {_step(event)}"
    return f"{saved}: {' '.join(details)}" if details else saved


def _uploaded(event: Mapping[str, object]) -> str:
    newest = f"; its newest is step {_step(event, 'newest_step')}" if "newest_step" in event else ""
    ended = "had a failure" if event.get("failed") else f"sent {size(number(event.get('sent_bytes')) or 0)}"
    return f"the upload of step {_step(event)} to the mirror {ended}{newest}"


def _resumed(event: Mapping[str, object]) -> str:
    text, changes = f"went on from {event.get('checkpoint', 'a checkpoint')}", event.get("changes")
    if isinstance(changes, list) and changes:
        text += f"; changed: {', '.join(map(str, changes))}"
    return text


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
    """Give a layout in words: the degrees of the axes that have more than one rank, and the sharding."""
    sharding, parts = layout.get("sharding"), []
    for axis, degree in layout.items():
        if isinstance(degree, int) and degree != 1:
            # Without sharding, the ranks of its axis are copies that share the data.
            name = "data" if axis == "shard" and sharding == "none" else axis
            parts.append(f"{name} {degree}")
    if not parts:
        parts.append("one rank")
    if sharding:
        parts.append(f"sharding {sharding}")
    return ", ".join(parts)


def style_of(event: Mapping[str, object]) -> EventStyle:
    """Give how an event is shown; an event of a later hfdist, whose kind is not known, is shown by its name."""
    name = str(event.get("event"))
    return _BY_NAME.get(name) or EventStyle(None, name, False, lambda e: f"{name}, step {_step(e)}")


def is_bad(event: Mapping[str, object]) -> bool:
    """Whether an event says that something went wrong."""
    ended_badly = event.get("state") in (State.failed.value, State.lost.value)
    return style_of(event).is_bad or (is_of(event, Event.end) and ended_badly)


def events_of(run: RunFiles, kind: Event) -> list[Mapping[str, object]]:
    """Give the events of one kind that a run has had, in their order."""
    return [event for event in run.events if is_of(event, kind)]


def is_of(event: Mapping[str, object], *kinds: Event) -> bool:
    """Whether an event is of one of these kinds."""
    return event.get("event") in [kind.value for kind in kinds]


def table(run: RunFiles) -> str:
    """Give a table as HTML of the events in words, the newest first, without saves and their uploads.

    Saves have a table of their own.
    """
    events = [event for event in reversed(run.events) if not is_of(event, Event.save, Event.mirror)]
    newest, earlier = _rows(events[:_MOST_OPEN]), _rows(events[_MOST_OPEN:_MOST_ROWS])
    if not earlier:
        return newest
    num_left_out = len(events) - _MOST_ROWS
    left_out = f"<p>{num_left_out:,} earlier ones are in events.jsonl.</p>" if num_left_out > 0 else ""
    return f'{newest}<details id="events-more"><summary>earlier events</summary>{earlier}{left_out}</details>'


def _rows(events: Sequence[Mapping[str, object]]) -> str:
    if not events:
        return ""
    lines = []
    for event in events:
        when = instant(event.get("time"))
        shown = "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}"
        bad = ' class="bad"' if is_bad(event) else ""
        words = escaped(style_of(event).words(event), 500)
        lines.append(f"<tr{bad}><td>{shown}</td><td>{escaped(event.get('start', ''), 12)}</td><td>{words}</td></tr>")
    head = "<tr><th>time (UTC)</th><th>start</th><th>what</th></tr>"
    return f'<table class="words events"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'
