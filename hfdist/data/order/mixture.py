"""The pool that each sequence comes from: exact shares by arithmetic, for any sequence without those before it.

Item j of a pool of share w is due at (j + 1/2) / w, and turns go to items in the order in which they are due (stride
scheduling). In any window of turns a pool has its share of them to within 1 + w * pools.

    weights 2:1, 3 lanes       round 0    round 1    round 2
    turns                      a b a      a b a      a b a
    sequences of lanes 0 1 2   a b a      b a a      a a b      each round rotated by another number

Each rotation comes once in as many rounds as there are lanes, so that no lane meets one pool only. A window of
sequences is then up to five windows of turns: whole rounds, and two pieces of the first round and of the last.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.shuffle import permutation

_CHUNK_SAMPLES = 1024
"""Turns that are worked out at once and kept, at least: one at a time would take as long for each."""


class Mixture:
    """A rule that picks a pool of documents for each sequence of a run.

    Args:
        phases: the first sample of each phase, rising from 0, and the weight of each pool in it; 0 pauses a pool.
        lanes: the number of lanes, which take turns: sequence i of the run is of lane i mod lanes.
    """

    def __init__(self, phases: Sequence[tuple[int, tuple[float, ...]]], *, lanes: int) -> None:
        self._phases, self._lanes = list(phases), lanes
        self._rotations = lru_cache(maxsize=8)(lambda cycle: permutation(lanes, "rotation", cycle))
        self._chunk_samples = -(-_CHUNK_SAMPLES // lanes) * lanes
        self._chunk = lru_cache(maxsize=64)(self._compute_chunk)

    def pick(self, sample: int, available: Sequence[int]) -> int | None:
        """Give the number of the pool of a sequence; None where no pool is available.

        Args:
            sample: number of the sequence in the run.
            available: pools that the sequence's lane has not finished; the shares of the others go to these. A paused
                pool has a share only where no other is available.
        """
        if not available:
            return None
        if len(available) == 1:
            return available[0]
        first_sample, weights = self._phase_at(sample)
        pools = tuple(pool for pool in available if weights[pool] > 0)
        if not pools:
            pools, weights = tuple(available), (1.0,) * len(weights)
        chunk, place = divmod(self._turn_of(sample - first_sample), self._chunk_samples)
        return int(self._chunk(tuple(weights[pool] for pool in pools), pools, chunk)[place])

    def _phase_at(self, sample: int) -> tuple[int, tuple[float, ...]]:
        """Give the first sample and the weights of the phase that a sample is in."""
        place = bisect.bisect_right(self._phases, sample, key=lambda phase: phase[0])
        return self._phases[place - 1]

    def _turn_of(self, sample: int) -> int:
        """Give the turn of a sample, counted from its phase's first: its place in the round, rotated."""
        round_, slot = divmod(sample, self._lanes)
        # In a cycle of as many rounds as there are lanes, each rotation comes once, in an order of the cycle's own.
        cycle, round_of_cycle = divmod(round_, self._lanes)
        rotation = int(self._rotations(cycle)[round_of_cycle])
        return round_ * self._lanes + (slot + rotation) % self._lanes

    def _compute_chunk(self, weights: tuple[float, ...], pools: tuple[int, ...], chunk: int) -> NDArray[np.int64]:
        """Give the pool of each turn of a chunk; shape [turns of a chunk]."""
        first = chunk * self._chunk_samples
        return np.array(pools)[stride_schedule(weights, first, first + self._chunk_samples)]


def stride_schedule(weights: Sequence[float], start: int, stop: int) -> NDArray[np.int64]:
    """Give the index of the weight whose turn it is, for each turn from `start` to before `stop`; shape [turns].

    The time grows with `stop - start`, and not with `start`.
    """
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights)
    # Items due by time T number T, give or take half of each weight: begin early and end late enough.
    margin = 2 * len(shares) + 2
    begin = np.floor(np.maximum(shares * (start - margin), 0) + 0.5).astype(np.int64)
    end = np.floor(shares * (stop + margin) + 0.5).astype(np.int64)
    sources = np.repeat(np.arange(len(shares)), end - begin)
    items = np.concatenate([np.arange(first, after) for first, after in zip(begin, end, strict=True)])
    order = np.lexsort((sources, (items + 0.5) / shares[sources]))
    skipped = start - int(begin.sum())
    return sources[order][skipped : skipped + stop - start]
