"""What a line of `ranks.jsonl` holds: figures of each rank or, with many ranks, their quantiles."""

from __future__ import annotations

from enum import Enum

QUANTILES = "quantiles"
"""Key of a line with many ranks: by column, the lowest, 10 %, median, 90 % and highest figure."""
HIGHEST = "highest"
"""Key of a line with many ranks: the highest figures, by rank."""
STEPS = "steps"
"""Key of a line with many ranks, where all of them stand in it: number of steps that it is of."""


class RankColumn(Enum):
    """The columns of ranks.jsonl. Seconds are means of a step since the last line; null: not known."""

    step_seconds = "step_seconds"
    """Seconds of a whole step, without evaluations and saves."""
    data_seconds = "data_seconds"
    """Seconds in the loader."""
    compute_seconds = "compute_seconds"
    """Seconds busy, or ready to run without a CPU core; null on a GPU."""
    wait_seconds = "wait_seconds"
    """Seconds blocked, as a rank is that waits for others; null on a GPU."""
    peak_bytes = "peak_bytes"
    """The most memory since the last line: allocated on a GPU, or resident on the host."""
