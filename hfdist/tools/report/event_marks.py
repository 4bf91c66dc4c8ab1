"""The events of a run as marks for its curves, one mark for events near each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hfdist.errors import printable
from hfdist.records import Event
from hfdist.tools.report.event_words import events_of, is_bad, is_of, style_of
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import LONGEST, number

_MOST_TEXTS = 4
"""Most events of a mark that its text describes."""


class EventMark(NamedTuple):
    """Some events at about one step, as one mark in all curves."""

    step: float
    """Step of the first event."""
    letters: str
    """A letter for each kind of event."""
    text: str
    """The events in words, a line each, of unknown origin."""
    is_bad: bool
    """Whether something went wrong in one of the events."""


def find_marks(run: RunFiles, most: int) -> list[EventMark]:
    """Give the marks of a run by step, about `most` at most: events of a stretch of steps share a mark."""
    marks = [_to_mark(event, step) for event, step in _with_steps(run) if _is_marked(event)]
    if not marks:
        return []
    marks.sort(key=lambda mark: mark.step)
    last_step = max([marks[-1].step, *run.metrics.steps[-1:]])
    # In a run without steps all marks lie at 0, and become one.
    width = last_step / most or 1.0
    groups = [[marks[0]]]
    for mark in marks[1:]:
        if mark.step - groups[-1][0].step < width:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [_join(group) for group in groups]


def _is_marked(event: Mapping[str, object]) -> bool:
    """Whether an event has a mark: its kind has a letter, and it is no good end."""
    is_good_end = is_of(event, Event.end) and not is_bad(event)
    return style_of(event).letter is not None and not is_good_end


def _to_mark(event: Mapping[str, object], step: float) -> EventMark:
    style = style_of(event)
    text = printable(f"step {step:,.0f}: {style.words(event)}", LONGEST)
    return EventMark(step, style.letter or "", text, is_bad(event))


def _join(marks: list[EventMark]) -> EventMark:
    letters = "".join(dict.fromkeys(mark.letters for mark in marks))
    texts = list(dict.fromkeys(mark.text for mark in marks))
    lines = texts[:_MOST_TEXTS]
    if len(texts) > _MOST_TEXTS:
        lines.append(f"and {len(texts) - _MOST_TEXTS} more near it")
    return EventMark(marks[0].step, letters, "\n".join(lines), any(mark.is_bad for mark in marks))


def _with_steps(run: RunFiles) -> Iterator[tuple[Mapping[str, object], float]]:
    """Give each event with its step.

    An event without a step gets the step at which its start ended, or else the step of the event before it.
    """
    end_steps = {repr(event.get("start")): number(event.get("step")) for event in events_of(run, Event.end)}
    step_before = 0.0
    for event in run.events:
        step = number(event.get("step"))
        if step is None:
            step = end_steps.get(repr(event.get("start")))
        if step is None:
            step = step_before
        yield event, step
        step_before = step
