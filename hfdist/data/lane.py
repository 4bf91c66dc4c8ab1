"""One lane: its sequences in order, from any place on, each from the pool of documents whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hfdist.config.data import Packing, TooLong
from hfdist.data.corpus import Pool
from hfdist.data.cursor import Place, Progress
from hfdist.data.documents import Documents
from hfdist.data.mixture import Mixture
from hfdist.data.order import LaneOrder
from hfdist.data.packing import sequence
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import Placed, Shape, assemble
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.portion import Portion
from hfdist.data.records import Fate
from hfdist.errors import DataError

# What may pass without a document to train on: a short lane may draw only held-out ones, another a damaged file.
_MOST_BARREN_EPOCHS, _MOST_BARREN_DOCUMENTS = 10, 1000
# Documents of token files that are judged together, of several blocks: twice as many each time.
_MOST_TOGETHER = 1024

Packed = tuple[int, int | None, sequence.Sequence]
"""Lane, pool (None: the lane has come to its end) and sequence."""


@dataclass(frozen=True)
class Plan:
    """What all lanes share: the order of each pool, whose turn it is, and how sequences are packed."""

    pools: Sequence[Pool]
    orders: Sequence[LaneOrder]
    """Of each pool."""
    mixture: Mixture
    packing: Packing
    too_long: TooLong
    shape: Shape
    seed: int

    def is_finished(self, pool: int, lane: int, place: Place) -> bool:
        """Whether a lane has come to the end of a pool: nothing is left of the last epoch that it may have."""
        limit = self.pools[pool].epochs
        return limit is not None and place[:2] >= (limit - 1, self.orders[pool].lane_length(limit - 1, lane))


class Lane:
    """Reads, tokenizes and packs the documents of one lane.

    Args:
        plan: of the run.
        documents: to read from.
        lane: number of the lane.
        pools: how far it has come in each pool.
    """

    def __init__(self, plan: Plan, documents: Documents, *, lane: int, pools: Sequence[Progress]) -> None:
        self._plan, self._documents, self._lane = plan, documents, lane
        self._sequences = {
            pool: self._pack(pool, progress.place)
            for pool, progress in enumerate(pools)
            if not plan.is_finished(pool, lane, progress.place)
        }
        self._available = tuple(self._sequences)
        """Pools of which something is left."""

    def next(self, sample: int) -> Packed:
        """Give the lane's next sequence.

        Args:
            sample: its number in the run.

        Raises:
            DataError: bad data, or none to train on.
        """
        pool = self._plan.mixture.pick(sample, self._available)
        if pool is None:
            return self._lane, None, assemble([], [], self._plan.shape, Place())
        packed = next(self._sequences[pool])
        # With its last sequence, not when more is asked for: a lane that goes on from here must pick as this one does.
        if self._plan.is_finished(pool, self._lane, packed.next_place):
            del self._sequences[pool]
            self._available = tuple(self._sequences)
        if pool > 0:
            packed.records["pool"] = pool
        return self._lane, pool, packed

    def _pack(self, pool: int, place: Place) -> Iterator[sequence.Sequence]:
        plan, portions = self._plan, self._portions(pool, place)
        key: tuple[int | str, ...] = (plan.seed, plan.pools[pool].name)
        match plan.packing:
            case Packing.concat:
                return concat(portions, plan.shape)
            case Packing.best_fit:
                return best_fit(_one_by_one(portions), place.offset, plan.shape, (*key, self._lane))
            case Packing.none:
                return one_each(_one_by_one(portions), place.offset, plan.shape, key)

    def _portions(self, pool: int, place: Place) -> Iterator[tuple[Place, Portion]]:
        """Documents of a pool in the lane's order, epoch after epoch, and where the first of them stands."""
        order, limit = self._plan.orders[pool], self._plan.pools[pool].epochs
        epoch, position, offset = place
        barren_epochs = barren_documents = 0
        # Windows are made of what is read together; end to end it does not matter.
        at_once = self._plan.packing is Packing.concat and self._documents.are_token_files(self._plan.pools[pool])
        num_together = 1
        while limit is None or epoch < limit:
            while position < order.lane_length(epoch, self._lane):
                if at_once:
                    numbers, ends = order.rest_of_blocks(epoch, self._lane, position, num_together)
                    num_together = min(2 * num_together, _MOST_TOGETHER)
                    portions = iter([self._documents.tokens_at_once(numbers)])
                else:
                    portions = self._documents.portions(order.rest_of_block(epoch, self._lane, position))
                for portion in portions:
                    barren_documents += len(portion.numbers)
                    trained = np.flatnonzero(portion.fates == Fate.trained)
                    if len(trained):
                        # As if each block had come by itself.
                        behind = ends[-1] - ends[np.searchsorted(ends, trained[-1], side="right")] if at_once else 0
                        barren_epochs, barren_documents = -1, int(behind)
                    yield Place(epoch, position, offset), portion
                    position, offset = position + len(portion.numbers), 0
            barren_epochs += 1
            is_endless = limit is None
            if is_endless and barren_epochs >= _MOST_BARREN_EPOCHS and barren_documents >= _MOST_BARREN_DOCUMENTS:
                raise DataError(
                    "a lane has no training documents",
                    where=f"lane {self._lane}, {self._plan.pools[pool].name}",
                    hint="fewer data.lanes",
                )
            epoch, position = epoch + 1, 0


def _one_by_one(portions: Iterator[tuple[Place, Portion]]) -> Iterator[list[Placed]]:
    for place, portion in portions:
        yield [Placed(place.epoch, place.position + n, document) for n, document in enumerate(portion.documents())]
