"""Lines of ranks.jsonl that stay short: of many ranks a line has quantiles, and all ranks stand in a few lines.

ranks                    up to 64      1,024                              16,384
lines with all ranks     each          each 64th, and after an alert      each 1,024th, and after an alert
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hfdist.records.lines import Line
from hfdist.records.rank_lines import HIGHEST, QUANTILES, STEPS, RankColumn

_COLUMNS = tuple(column.value for column in RankColumn)
_MOST_RANKS = 64
"""The most ranks that stand in each line."""
_RANKS_A_LINE = 16
"""Of more ranks than `_MOST_RANKS`, a line has so many on average: all ranks stand in a few lines."""
_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Levels of the quantiles in a line."""
_NUM_HIGHEST = 4
"""Number of ranks whose figures are the highest that a line names."""


class RankSummary:
    """Makes the lines of ranks.jsonl from what all ranks have measured.

    A line with all ranks has their figures over all steps since the last such line, so no step is lost.

    Args:
        num_ranks: number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._is_small = num_ranks <= _MOST_RANKS
        self._interval = 1 if self._is_small else -(-num_ranks // _RANKS_A_LINE)
        self._num_lines, self._num_steps = 0, 0
        self._figures = np.zeros((len(_COLUMNS), num_ranks))
        """Sums of seconds, and the highest peaks, of all steps since the ranks last stood in a line."""

    def line(self, step: int, num_steps: int, figures: NDArray[np.float64], *, with_ranks: bool = False) -> Line:
        """Make the line of a step.

        Args:
            step: number of the step.
            num_steps: number of steps that the figures are means of.
            figures: [columns of `RankColumn`, ranks]; NaN: not known.
            with_ranks: whether all ranks stand in the line, whatever the interval.
        """
        self._num_steps += num_steps
        self._figures[:-1] += num_steps * figures[:-1]
        self._figures[-1] = np.maximum(self._figures[-1], figures[-1])
        line: Line = {"step": step} | ({} if self._is_small else _summary(figures))
        # In the steps of the first line everything is done for the first time: it must not be part of a mean.
        if with_ranks or self._num_lines % self._interval == 0:
            line |= self.take()
        self._num_lines += 1
        return line

    def take(self) -> Line:
        """Give the columns of all ranks since they last stood in a line, and begin anew; {}: no step since then."""
        if not self._num_steps:
            return {}
        line: Line = {} if self._is_small else {STEPS: self._num_steps}
        line |= to_columns(np.vstack([self._figures[:-1] / self._num_steps, self._figures[-1:]]))
        self._num_steps = 0
        self._figures[:] = 0.0
        return line


def to_columns(figures: NDArray[np.float64]) -> dict[str, list[float | None]]:
    """Give the columns of a line: microseconds at most, whole bytes, and None for what is not known."""
    *seconds, peaks = figures
    # Six digits of seconds are microseconds: more are noise.
    rounded = [[None if np.isnan(value) else round(value, 6) for value in row.tolist()] for row in seconds]
    return dict(zip(_COLUMNS, [*rounded, [int(value) for value in peaks.tolist()]], strict=True))


def _summary(figures: NDArray[np.float64]) -> Line:
    """Describe each column that is known: its quantiles, and the ranks with the highest figures."""
    quantiles, highest = {}, {}
    for name, row in zip(_COLUMNS, figures, strict=True):
        if not np.isnan(row).any():
            digits = None if name == RankColumn.peak_bytes.value else 6
            quantiles[name] = [round(value, digits) for value in np.quantile(row, _LEVELS).tolist()]
            ranks = np.argsort(-row, kind="stable")[:_NUM_HIGHEST].tolist()
            highest[name] = {str(rank): round(float(row[rank]), digits) for rank in ranks}
    return {QUANTILES: quantiles, HIGHEST: highest}
