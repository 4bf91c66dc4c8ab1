"""`events.jsonl`: what has happened to a run, one line each, over all of its starts. No line is ever taken away."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from hfdist.records.lines import append_line
from hfdist.records.run_folder import RunFolder


class Event(Enum):
    """The kinds of events, with the fields that each has besides `time`, `start` (1: the first) and `event`."""

    start = "start"
    """layout, host"""
    resume = "resume"
    """step, checkpoint, changes: of the config, a text each; in_memory: true, of a replica"""
    replica = "replica"
    """step: where the run begins, found: what is wrong with a replica in memory that was passed over"""
    save = "save"
    """step, bytes, seconds, stall_seconds"""
    mirror = "mirror"
    """step: of the upload, bytes, sent_bytes: what was not there, seconds; failed: 1, if it has; failures: so far;
    newest_step: that of the mirror, if it has one"""
    skip = "skip"
    """step: one whose loss or gradient was not finite"""
    rollback = "rollback"
    """step: where the run was, to_step: where it went back to"""
    lost_rank = "lost_rank"
    """found: what the watch over the ranks has found"""
    alert = "alert"
    """step, kind, text, and the figures of the text"""
    budget = "budget"
    """step, which: `max_hours`, `max_cost`, `max_kwh` or `deadline`, used, limit"""
    end = "end"
    """step, state, exit_code, error"""


def utc_now() -> str:
    """Give the time as ISO 8601, in UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def add_event(run_dir: Path, event: Event, *, start: int, **fields: object) -> None:
    """Add a line.

    Raises:
        ResourceError: the disk is full.
    """
    append_line(RunFolder(run_dir).events, {"time": utc_now(), "start": start, "event": event.value} | fields)
