"""The order of documents as arithmetic: a pure function of (seed, epoch, lane, position), with no buffer and no state.

    documents   0 1 2 | 3 4 | 5 6 7 | 8 9      canonical order, cut into blocks of neighbouring rows
    units       [A A] [B B]                    what is permuted: blocks, or whole shards where the corpus is large
    epoch e     B B A A                        units permuted, keyed by (seed, e)
    lanes       0 0 1 1                        each lane gets a stretch of it, all equally many blocks
    in a lane   blocks of a window permuted, and the rows of a block

A lane of a large corpus stays in a few shards, so that a machine fetches its own share. Sequence i of the run comes
from lane i mod lanes, and a data rank serves whole lanes, so that the global batch is the same for every number of data
ranks that divides the lanes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LARGEST_BLOCK_ROWS = 1024
_BLOCKS_PER_LANE = 16
_WINDOW_BLOCKS = 64


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """Give range(size) in the order that a key decides: sorted by the hashes of its numbers."""
    return np.argsort(_mix(_start(key) + np.arange(size, dtype=np.uint64)), kind="stable")


def _start(key: tuple[int | str, ...]) -> np.uint64:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def cut_runs(runs: Sequence[int], most_rows: int) -> list[int]:
    """Split each run into blocks of `most_rows`; the last one of a run may be smaller."""
    return [min(most_rows, rows - start) for rows in runs for start in range(0, rows, most_rows)]


class LaneOrder:
    """Which document stands at which position of which lane. Lanes go through their epochs independently.

    Args:
        shards: of each shard, its runs: numbers of rows that are cheap to read together, in canonical order.
        lanes: of the stream.
        key: of all permutations: the seed, and what else tells this order from others.
        first_document: canonical number of the first row.
    """

    def __init__(
        self, shards: Sequence[Sequence[int]], *, lanes: int, key: tuple[int | str, ...], first_document: int = 0
    ) -> None:
        num_rows = sum(sum(runs) for runs in shards)
        # Small enough that each lane has many blocks, large enough that reading stays local.
        fair_rows = max(num_rows // (lanes * _BLOCKS_PER_LANE), 1)
        by_shard = [cut_runs(runs, min(fair_rows, _LARGEST_BLOCK_ROWS)) for runs in shards]
        self._sizes = np.array([size for sizes in by_shard for size in sizes], dtype=np.int64)
        self._firsts = first_document + np.cumsum(self._sizes) - self._sizes
        self._moves_shards = fair_rows >= _LARGEST_BLOCK_ROWS
        counts = [len(sizes) for sizes in by_shard] if self._moves_shards else [1] * len(self._sizes)
        self._unit_blocks = np.array(counts, dtype=np.int64)
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

    def rest_of_blocks(self, epoch: int, lane: int, position: int, most_rows: int) -> NDArray[np.int64]:
        """Canonical numbers from `position` on, which the lane must have, to the end of its block or of one behind it.

        Further blocks are given as long as all have at most `most_rows` documents.
        """
        blocks, ends = self._lane_blocks(epoch, lane)
        place = int(np.searchsorted(ends, position, side="right"))
        chosen = blocks[place : max(place + 1, int(np.searchsorted(ends, position + most_rows, side="right")))]
        sizes = self._sizes[chosen]
        stops = np.cumsum(sizes)
        owners = np.repeat(np.arange(len(chosen)), sizes)
        begins = (stops - sizes)[owners]
        keys = np.array([_start((*self._key, epoch, block)) for block in chosen.tolist()], dtype=np.uint64)
        numbers = np.arange(len(owners)) - begins
        # Each block's rows sorted by their hashes, as `permutation` does.
        order = np.lexsort((_mix(keys[owners] + numbers.astype(np.uint64)), owners))
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
        # Behind the unit's last block as many as are left of it.
        blocks = self._unit_ends[unit] - (ends[order] - places)
        return blocks, np.cumsum(self._sizes[blocks])

    def _compute_units(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Units in this epoch's order, and where each ends, counted in blocks."""
        units = permutation(len(self._unit_blocks), *self._key, epoch, "units")
        return units, np.cumsum(self._unit_blocks[units])


def lanes_of_rank(data_rank: int, data_size: int, lanes: int) -> list[int]:
    """Lanes that a data rank serves, in the order in which it serves them."""
    return list(range(data_rank, lanes, data_size))


def workers_that_fit(workers: int, rank_lanes: int) -> int:
    """Largest number of workers, at most `workers`, of which each can own whole lanes of a rank."""
    return max((n for n in range(1, workers + 1) if rank_lanes % n == 0), default=0)
