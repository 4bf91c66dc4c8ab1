"""How a trial has ended, by its run's record and the exit code of its process; and its last value of a metric."""

from __future__ import annotations

import math
from enum import Enum, auto
from pathlib import Path

from hfdist.errors import BudgetError, PeerError
from hfdist.records import RunFolder, RunRecord, State, read_lines

_SIGNALS = range(129, 129 + 64)
"""Exit codes of a shell for a process that a signal has ended; 255 is that of a program that gives up."""


class End(Enum):
    """What has become of a trial on its way to the end of a rung."""

    done = auto()
    stopped = auto()
    failed = auto()
    """It failed, and its run says why."""
    failed_before_it_began = auto()
    killed = auto()
    """A signal from outside ended it, so that it may go on."""


def how_ended(record: RunRecord | None, exit_code: int | None, *, is_told_to_stop: bool) -> End:
    """Say how a trial has ended.

    Args:
        record: the record of its last start; None: that had not begun.
        exit_code: the exit code of its process; None: not known.
        is_told_to_stop: whether the sweep has told its trials to stop.
    """
    # A trial whose own budget is used up is done.
    if record is not None and (record.state is State.finished or record.exit_code == BudgetError.exit_code):
        return End.done
    if is_told_to_stop or (record is not None and record.state is State.stopped):
        return End.stopped
    if record is not None and record.state is State.failed and not _was_killed(record):
        return End.failed
    if record is None and (exit_code or 0) > 0 and exit_code not in _SIGNALS:
        return End.failed_before_it_began
    return End.killed


def _was_killed(record: RunRecord) -> bool:
    """Whether the run was ended from outside: a rank was lost, or a signal came before it could save."""
    return record.exit_code == PeerError.exit_code or record.exit_code in _SIGNALS


def last_value(folder: Path, metric: str) -> float | None:
    """Give the last value of a metric of a run; None: there is none, or it is not finite."""
    found: list[float | None] = [line[metric] for line in read_lines(RunFolder(folder).metrics) if metric in line]
    value = found[-1] if found else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
