"""Which pool of documents a sequence comes from: exact shares by arithmetic, for any sample without those before it.

Item j of a source of share w is due at (j + 1/2) / w, and items come in the order in which they are due (stride
scheduling). In any window of turns a source has its share of them to within 1 + w * sources.

    weights 2:1     a b a | a b a | a b a ...

Each round of lanes gets them in another rotation, each rotation once in as many rounds as there are lanes, so that no
lane meets one source only. A window of sequences is then up to five windows of turns: whole rounds, and two
pieces of the first round and of the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.shuffle import permutation

_CHUNK_SAMPLES = 1024


class Mixture:
    """Picks a pool of documents for each sequence.

    `phases` are first samples, rising from 0, and the weights of the pools from there on; 0 pauses a pool.
    """

    def __init__(self, phases: Sequence[tuple[int, tuple[float, ...]]], *, lanes: int) -> None:
        self._phases, self._lanes = list(phases), lanes
        self._rotations = lru_cache(maxsize=8)(lambda cycle: permutation(lanes, "rotation", cycle))
        self._chunk_samples = -(-_CHUNK_SAMPLES // lanes) * lanes
        self._chunk = lru_cache(maxsize=64)(self._compute_chunk)

    def pick(self, sample: int, available: Sequence[int]) -> int | None:
        """Give the pool of sequence `sample` of the run; None where no pool is available.

        Args:
            sample: number of the sequence.
            available: pools that the sequence's lane has not finished; the others' share goes to these. Paused ones
                have a share only where there is no other.
        """
        if len(available) <= 1:
            return available[0] if available else None
        first_sample, weights = [phase for phase in self._phases if phase[0] <= sample][-1]
        weighted = tuple(pool for pool in available if weights[pool] > 0)
        if not weighted:
            weights, weighted = (1.0,) * len(weights), tuple(available)
        round_, slot = divmod(sample - first_sample, self._lanes)
        cycle, turn_of_cycle = divmod(round_, self._lanes)
        turn = round_ * self._lanes + (slot + int(self._rotations(cycle)[turn_of_cycle])) % self._lanes
        chunk, place = divmod(turn, self._chunk_samples)
        return int(self._chunk(tuple(weights[pool] for pool in weighted), weighted, chunk)[place])

    def _compute_chunk(self, weights: tuple[float, ...], pools: tuple[int, ...], chunk: int) -> NDArray[np.int64]:
        first = chunk * self._chunk_samples
        return np.array(pools)[stride_schedule(weights, first, first + self._chunk_samples)]


def stride_schedule(weights: Sequence[float], start: int, stop: int) -> NDArray[np.int64]:
    """Index of the weight whose turn it is, for each turn in [start, stop), in O(stop - start)."""
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights)
    # Items due by time T number T, give or take half of each weight: begin early and end late enough.
    margin = 2 * len(shares) + 2
    begin = np.floor(np.maximum(shares * (start - margin), 0) + 0.5).astype(np.int64)
    end = np.floor(shares * (stop + margin) + 0.5).astype(np.int64)
    sources = np.repeat(np.arange(len(shares)), end - begin)
    items = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
    order = np.lexsort((sources, (items + 0.5) / shares[sources]))
    skipped = start - int(begin.sum())
    return sources[order][skipped : skipped + stop - start]
