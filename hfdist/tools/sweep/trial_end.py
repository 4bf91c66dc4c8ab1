"""What a trial has left at its end: how it has ended, and its last value of the metric."""

from __future__ import annotations

import math
from enum import Enum, auto
from pathlib import Path

from hfdist.errors import BudgetError, PeerError
from hfdist.records import RunFolder, RunRecord, State, read_lines

_SIGNALS = range(128 + 1, 128 + 65)
"""Exit codes that a shell gives for signals 1 to 64; 255 is no signal, but the code of a program that gives up."""


class End(Enum):
    """How a trial has ended on its way to the end of a rung."""

    done = auto()
    """The trial has reached the end of the rung."""
    stopped = auto()
    """The trial was told to stop, and may go on."""
    failed = auto()
    """The trial's run has failed, and its record says why."""
    failed_before_it_began = auto()
    """The trial's process has failed before its run had written a record."""
    killed = auto()
    """The trial was ended from outside, and may go on."""


def how_ended(record: RunRecord | None, exit_code: int | None, *, is_told_to_stop: bool) -> End:
    """Say how a trial has ended.

    Args:
        record: the record of the trial's last start; None: its run had not begun.
        exit_code: the exit code of the trial's process; None: not known.
        is_told_to_stop: whether the sweep has told its trials to stop.
    """
    if record is None:
        has_failed = exit_code is not None and exit_code > 0 and exit_code not in _SIGNALS
        if is_told_to_stop:
            return End.stopped
        return End.failed_before_it_began if has_failed else End.killed
    # A trial whose own budget is used up is done, too.
    if record.state is State.finished or record.exit_code == BudgetError.exit_code:
        return End.done
    if is_told_to_stop or record.state is State.stopped:
        return End.stopped
    if record.state is State.failed and not _was_killed(record):
        return End.failed
    return End.killed


def _was_killed(record: RunRecord) -> bool:
    """Whether the run was ended from outside: a rank was lost, or a signal came before it could save."""
    return record.exit_code == PeerError.exit_code or record.exit_code in _SIGNALS


def last_value(folder: Path, metric: str) -> float | None:
    """Give the last value of a metric in a run's folder; None: there is none, or it is not finite."""
    values = [line[metric] for line in read_lines(RunFolder(folder).metrics) if metric in line]
    last = values[-1] if values else None
    return float(last) if isinstance(last, (int, float)) and math.isfinite(last) else None
