"""The times of ranks over some lines of ranks.jsonl: which rank computes longer than others, or waits for its data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from hfdist.records.lines import Line
from hfdist.tools.alerts.alert import Detection

_SLOW_TIMES, _SLOW_SHARE = 1.3, 0.15
"""A slow rank computes more than so many times as long as the others, and longer by more than this share of a step."""
_SLOW_LINES = 0.75
"""A slow rank is the slowest in at least this share of the lines."""
_DATA_SHARE = 0.2
"""A rank that waits for its data for more than this share of a step is an alert."""


class _Slowest(NamedTuple):
    """The rank of a stage that computes longest; such values compare by their excess."""

    excess: float
    """Seconds by which it computes longer than the median of the others, in the whole window."""
    rank: int
    others: float
    """That median, in seconds."""


class RankWindow:
    """Times of ranks, summed over some lines of ranks.jsonl.

    Args:
        num_stages: number of pipeline stages: only ranks of one stage have the same work.
        hosts: name of each rank's host; empty: not known.
    """

    def __init__(self, num_stages: int, hosts: Sequence[str]) -> None:
        self._num_stages, self._hosts = num_stages, hosts
        self.num_lines = 0
        """Number of lines in the window."""
        self.seconds = 0.0
        """Seconds of all steps in the window, in the mean of ranks."""
        self._num_steps = 0
        # By rank: seconds of all steps, and the number of lines in which the rank computed longest of its stage.
        self._data: list[float] = []
        self._compute: list[float] = []
        self._num_slowest: list[int] = []

    def add(self, line: Line, num_steps: int) -> None:
        """Add a line, whose times are means of `num_steps` steps."""
        step, data, compute = (line[f"{name}_seconds"] for name in ("step", "data", "compute"))
        if not self.num_lines:
            num_ranks = len(data)
            self._data, self._compute, self._num_slowest = [0.0] * num_ranks, [0.0] * num_ranks, [0] * num_ranks
        self.num_lines += 1
        self._num_steps += num_steps
        self.seconds += num_steps * fmean(step)
        for rank, seconds in enumerate(data):
            self._data[rank] += num_steps * (seconds or 0.0)
        # On a GPU the time to compute is not measured.
        if None in compute:
            return
        for rank, seconds in enumerate(compute):
            self._compute[rank] += num_steps * seconds
        for stage in self._stages():
            self._num_slowest[max(stage, key=lambda rank: compute[rank])] += 1

    def find_slow_rank(self) -> Detection | None:
        """Find the rank that computes much longer than the others with the same work; None: there is none."""
        found: list[_Slowest] = []
        for stage in self._stages():
            rank = max(stage, key=lambda rank: self._compute[rank])
            others = [self._compute[other] for other in stage if other != rank]
            if others and self._num_slowest[rank] >= _SLOW_LINES * self.num_lines:
                usual = median(others)
                found.append(_Slowest(self._compute[rank] - usual, rank, usual))
        if not found:
            return None
        slowest = max(found)
        is_much_of_step = slowest.excess > _SLOW_SHARE * self.seconds
        if not is_much_of_step or slowest.excess <= (_SLOW_TIMES - 1) * slowest.others:
            return None
        rank = slowest.rank
        seconds, of_others = self._compute[rank] / self._num_steps, slowest.others / self._num_steps
        return Detection(
            f"{self._name(rank)} is slow: it computes {seconds:.3g} s in a step of {self._step_seconds:.3g} s, the"
            f" others {of_others:.3g} s, and they wait for it; that machine may be too hot, or have other work",
            {"rank": rank, "host": self._host(rank), "compute_seconds": seconds, "of_others": of_others},
        )

    def find_data_wait(self) -> Detection | None:
        """Find the rank that waits longest for its data, if that is much of the time; None: it is not."""
        rank = max(range(len(self._data)), key=lambda rank: self._data[rank])
        share = self._data[rank] / self.seconds
        if share <= _DATA_SHARE:
            return None
        seconds = self._data[rank] / self._num_steps
        return Detection(
            f"{self._name(rank)} waits for its data in {share:.0%} of the time: {seconds:.3g} s in a step of"
            f" {self._step_seconds:.3g} s; more data.workers, or files on a faster disk",
            {"rank": rank, "host": self._host(rank), "data_seconds": seconds, "share": share},
        )

    @property
    def _step_seconds(self) -> float:
        """The mean seconds of a step."""
        return self.seconds / self._num_steps

    def _stages(self) -> list[range]:
        """Give the ranks of each pipeline stage, which follow each other."""
        num_ranks = len(self._data)
        size = max(num_ranks // self._num_stages, 1)
        return [range(first, first + size) for first in range(0, num_ranks, size)]

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if rank < len(self._hosts) else ""

    def _name(self, rank: int) -> str:
        host = self._host(rank)
        return f"rank {rank} (on {host})" if host else f"rank {rank}"
