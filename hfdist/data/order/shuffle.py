"""The order of documents as arithmetic: a pure function of (seed, epoch, lane, position), with no buffer and no state.

    documents   0 1 2 | 3 4 | 5 6 7 | 8 9      canonical order, cut into blocks of neighbouring rows
    units       [A A] [B B]                    what is permuted: blocks, or whole shards where the corpus is large
    epoch e     B B A A                        units permuted, keyed by (seed, e)
    lanes       0 0 1 1                        each lane gets a stretch of it, all equally many blocks
    in a lane   blocks of a window permuted, and the rows of a block

A lane of a large corpus stays in a few shards, so that a machine fetches its own share. Sequence i of the run comes
from lane i mod lanes, and a data rank serves whole lanes, so that the global batch is the same for every number of data
ranks that divides the lanes.

`Mixture` says which source a sequence comes from: exact shares by arithmetic, for any sample without those before it.
Item j of a source of share w is due at (j + 1/2) / w, and items come in the order in which they are due (stride
scheduling). In any window of turns a source has its share of them to within 1 + w * sources.

    weights 2:1     a b a | a b a | a b a ...

Each round of lanes gets them in another rotation, each rotation once in as many rounds as there are lanes, so that no
lane meets one source only. A window of sequences is then up to five windows of turns: whole rounds, and two
pieces of the first round and of the last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.runs import Runs

_LARGEST_BLOCK_ROWS = 1024
_BLOCKS_PER_LANE = 16
_WINDOW_BLOCKS = 64
_CHUNK_SAMPLES = 1024


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """Give range(size) in the order that a key decides: sorted by the hashes of its numbers."""
    numbers: NDArray[np.uint64] = np.arange(size, dtype=np.uint64) + _starts([key])
    return np.argsort(_mix(numbers), kind="stable")


def _starts(keys: Iterable[tuple[int | str, ...]]) -> NDArray[np.uint64]:
    """Hashes of keys, shape [keys]."""
    digests = [hashlib.blake2b(repr(key).encode(), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), "<u8")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class LaneOrder:
    """Which document stands at which position of which lane. Lanes go through their epochs independently.

    Args:
        runs: of the shards, in canonical order.
        lanes: of the stream.
        key: of all permutations: the seed, and what else tells this order from others.
        first_document: canonical number of the first row.
    """

    def __init__(self, runs: Runs, *, lanes: int, key: tuple[int | str, ...], first_document: int = 0) -> None:
        num_rows = int(runs.rows.sum())
        # Small enough that each lane has many blocks, large enough that reading stays local.
        fair_rows = max(num_rows // (lanes * _BLOCKS_PER_LANE), 1)
        self._sizes, per_shard = runs.cut(min(fair_rows, _LARGEST_BLOCK_ROWS))
        self._firsts = first_document + np.cumsum(self._sizes) - self._sizes
        self._moves_shards = fair_rows >= _LARGEST_BLOCK_ROWS
        self._unit_blocks = per_shard if self._moves_shards else np.ones_like(self._sizes)
        """Blocks of each unit."""
        self._unit_ends = np.cumsum(self._unit_blocks)
        self._lanes, self._key = lanes, key
        # Bounded caches: a lane is in one epoch at a time, and lanes drift apart by one or two.
        self._lane_blocks = lru_cache(maxsize=4 * lanes)(self._compute_lane_blocks)
        self._units = lru_cache(maxsize=4)(self._compute_units)

    def lane_length(self, epoch: int, lane: int) -> int:
        """Number of documents of a lane in an epoch."""
        ends = self._lane_blocks(epoch, lane)[1]
        return int(ends[-1]) if len(ends) else 0

    def documents(self, epoch: int, lane: int) -> NDArray[np.int64]:
        """Canonical numbers of all documents of a lane in an epoch, in the lane's order."""
        length = self.lane_length(epoch, lane)
        return self.rest_of_blocks(epoch, lane, 0, length) if length else np.empty(0, dtype=np.int64)

    def rest_of_blocks(self, epoch: int, lane: int, position: int, least_rows: int) -> NDArray[np.int64]:
        """Canonical numbers from `position` on, which must be in the lane, to the end of a block.

        So many blocks that there are `least_rows` documents, one or more, if the lane has as many.
        """
        blocks, ends = self._lane_blocks(epoch, lane)
        place = int(ends.searchsorted(position, side="right"))
        chosen = blocks[place : int(ends.searchsorted(position + least_rows)) + 1]
        sizes = self._sizes[chosen]
        stops = np.cumsum(sizes)
        owners = np.repeat(np.arange(len(chosen), dtype=np.min_scalar_type(len(chosen))), sizes)
        begins = (stops - sizes)[owners]
        keys = _starts((*self._key, epoch, block) for block in chosen.tolist())
        numbers = np.arange(len(owners)) - begins
        # Each block's rows sorted by their hashes, as `permutation` does. No two of a block are equal, so the fastest
        # sort does; and numbers of blocks in a narrow type are sorted in linear time.
        order = np.argsort(_mix(keys[owners] + numbers.astype(np.uint64)))
        order = order[np.argsort(owners[order], kind="stable")]
        first = position - (int(ends[place]) - int(sizes[0]))
        return (self._firsts[chosen][owners] + order - begins)[first:]

    def _compute_lane_blocks(self, epoch: int, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Blocks of a lane, and where each ends, counted in the lane's documents."""
        units, ends = self._units(epoch)
        num_blocks = len(self._sizes)
        first, last = lane * num_blocks // self._lanes, (lane + 1) * num_blocks // self._lanes
        places = np.arange(first, last)
        if self._moves_shards:
            for start in range(0, len(places), _WINDOW_BLOCKS):
                window = places[start : start + _WINDOW_BLOCKS]
                window[:] = window[permutation(len(window), *self._key, epoch, lane, "window", start)]
        order = np.searchsorted(ends, places, side="right")
        unit = units[order]
        # As many blocks before the unit's end as are left of the unit.
        blocks = self._unit_ends[unit] - (ends[order] - places)
        return blocks, np.cumsum(self._sizes[blocks])

    def _compute_units(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Units in this epoch's order, and where each ends, counted in blocks."""
        units = permutation(len(self._unit_blocks), *self._key, epoch, "units")
        return units, np.cumsum(self._unit_blocks[units])


def workers_that_fit(workers: int, rank_lanes: int) -> int:
    """Largest number of workers, at most `workers`, of which each can own whole lanes of a rank."""
    return max((n for n in range(1, workers + 1) if rank_lanes % n == 0), default=0)


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
