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
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.runs import Runs

_LARGEST_BLOCK_ROWS = 1024
"""Rows of the largest block: neighbours that are cheap to read together."""
_BLOCKS_PER_LANE = 16
"""Blocks that a lane of a small corpus has at least, where it has the rows, so that its documents are well mixed."""
_WINDOW_BLOCKS = 64
"""Neighbouring blocks of a lane that are permuted with each other, where units are whole shards."""


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """Give the numbers 0 to `size` - 1 in the order that `key` decides: sorted by their hashes; shape [size]."""
    numbers: NDArray[np.uint64] = np.arange(size, dtype=np.uint64) + _starts([key])
    return np.argsort(_mix(numbers), kind="stable")


def _starts(keys: Iterable[tuple[int | str, ...]]) -> NDArray[np.uint64]:
    """Hash keys; shape [keys]."""
    digests = [hashlib.blake2b(repr(key).encode(), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), "<u8")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash numbers by the finalizer of splitmix64, in which every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class LaneOrder:
    """The order of documents in each lane and epoch. Lanes go through their epochs independently.

    Args:
        runs: the runs of rows of all shards, in canonical order.
        lanes: the number of lanes of the stream.
        key: the key of all permutations: the seed, and what else tells this order from others.
        first_document: the canonical number of the first row.
    """

    def __init__(self, runs: Runs, *, lanes: int, key: tuple[int | str, ...], first_document: int = 0) -> None:
        num_rows = int(runs.rows.sum())
        # Small enough that each lane has many blocks, large enough that reading stays local.
        fair_rows = max(num_rows // (lanes * _BLOCKS_PER_LANE), 1)
        self._sizes, per_shard = runs.cut(min(fair_rows, _LARGEST_BLOCK_ROWS))
        self._firsts = first_document + np.cumsum(self._sizes) - self._sizes
        self._moves_shards = fair_rows >= _LARGEST_BLOCK_ROWS
        self._unit_blocks = per_shard if self._moves_shards else np.ones_like(self._sizes)
        """Number of blocks of each unit, in canonical order."""
        self._unit_ends = np.cumsum(self._unit_blocks)
        """End of each unit, counted in blocks."""
        self._lanes, self._key = lanes, key
        # Bounded caches: a lane is in one epoch at a time, and lanes drift apart by one or two.
        self._lane_blocks = lru_cache(maxsize=4 * lanes)(self._compute_lane_blocks)
        self._units = lru_cache(maxsize=4)(self._compute_units)

    def lane_length(self, epoch: int, lane: int) -> int:
        """Count the documents of a lane in an epoch."""
        _, ends = self._lane_blocks(epoch, lane)
        return int(ends[-1]) if len(ends) else 0

    def documents(self, epoch: int, lane: int) -> NDArray[np.int64]:
        """Give the canonical numbers of all documents of a lane in an epoch, in the lane's order; shape [documents]."""
        length = self.lane_length(epoch, lane)
        return self.rest_of_blocks(epoch, lane, 0, length) if length else np.empty(0, dtype=np.int64)

    def rest_of_blocks(self, epoch: int, lane: int, position: int, least_rows: int) -> NDArray[np.int64]:
        """Give the canonical numbers of a lane's documents from a position on, to the end of a block.

        Args:
            epoch: epoch of the lane.
            lane: number of the lane.
            position: place of the first document in the lane's order; the lane must have it.
            least_rows: number of documents, one or more, after which the next end of a block is the last; the lane may
                have fewer.

        Returns:
            Numbers, shape [documents].
        """
        blocks, ends = self._lane_blocks(epoch, lane)
        place = int(ends.searchsorted(position, side="right"))
        last_place = int(ends.searchsorted(position + least_rows))
        chosen = blocks[place : last_place + 1]
        sizes = self._sizes[chosen]
        # For each row of these blocks: its block, where that block begins among the rows, and its number in the block.
        owners = np.repeat(np.arange(len(chosen), dtype=np.min_scalar_type(len(chosen))), sizes)
        begins = (np.cumsum(sizes) - sizes)[owners]
        numbers = np.arange(len(owners)) - begins
        keys = _starts((*self._key, epoch, block) for block in chosen.tolist())
        # Each block's rows sorted by their hashes, as `permutation` does. No two of a block are equal, so the fastest
        # sort does; and numbers of blocks in a narrow type are sorted in linear time.
        order = np.argsort(_mix(keys[owners] + numbers.astype(np.uint64)))
        order = order[np.argsort(owners[order], kind="stable")]
        documents = self._firsts[chosen][owners] + order - begins
        first_position = int(ends[place]) - int(sizes[0])
        return documents[position - first_position :]

    def _compute_lane_blocks(self, epoch: int, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the blocks of a lane in its order, and the end of each, counted in the lane's documents."""
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
        # The block is as far before the unit's end as this place is before the end of the unit's places.
        blocks = self._unit_ends[unit] - (ends[order] - places)
        return blocks, np.cumsum(self._sizes[blocks])

    def _compute_units(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the units in this epoch's order, and the end of each, counted in blocks of this order."""
        units = permutation(len(self._unit_blocks), *self._key, epoch, "units")
        return units, np.cumsum(self._unit_blocks[units])
