"""The events of a run as marks in its curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hfdist.errors import printable
from hfdist.records import Event
from hfdist.tools.report.event_words import events_of, is_bad, is_of, style_of
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import LONGEST, number

_MOST_TEXTS = 4
"""Most texts of a mark."""


class EventMark(NamedTuple):
    """Events at about one step, as one mark in all curves."""

    step: float
    letters: str
    text: str
    """Text of unknown origin."""
    is_bad: bool


def find_marks(run: RunFiles, most: int) -> list[EventMark]:
    """Give about `most` marks at most; a good end has none. Events near each other share a mark."""
    found = []
    for event, step in _with_steps(run):
        letter = style_of(event).letter
        if letter is not None and (not is_of(event, Event.end) or is_bad(event)):
            text = f"step {step:,.0f}: {style_of(event).words(event)}"
            found.append(EventMark(step, letter, printable(text, LONGEST), is_bad(event)))
    found.sort(key=lambda mark: mark.step)
    groups: list[list[EventMark]] = []
    # In a run without steps all marks lie at 0, and become one.
    width = max([mark.step for mark in found[-1:]] + run.metrics.steps[-1:], default=0.0) / most or 1.0
    for mark in found:
        if groups and mark.step - groups[-1][0].step < width:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [_join(own) for own in groups]


def _join(marks: list[EventMark]) -> EventMark:
    letters = "".join(dict.fromkeys(mark.letters for mark in marks))
    texts = list(dict.fromkeys(mark.text for mark in marks))
    more = [f"and {len(texts) - _MOST_TEXTS} more near it"] if len(texts) > _MOST_TEXTS else []
    text = "\n".join([*texts[:_MOST_TEXTS], *more])
    return EventMark(marks[0].step, letters, text, any(mark.is_bad for mark in marks))


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
