"""`ranks.jsonl`: one line for each logged step, with a number for each rank in each column, in order of rank."""

from __future__ import annotations

from enum import Enum


class RankColumn(Enum):
    """The columns. Seconds are means of a step since the last line; null: not known."""

    step_seconds = "step_seconds"
    """Without evaluations and saves."""
    data_seconds = "data_seconds"
    """In the loader."""
    compute_seconds = "compute_seconds"
    """Busy, or ready to run without a CPU core; null on a GPU."""
    wait_seconds = "wait_seconds"
    """Blocked, as a rank is that waits for others; null on a GPU."""
    peak_bytes = "peak_bytes"
    """The most memory since the last line: allocated on a GPU, or resident on the host."""
