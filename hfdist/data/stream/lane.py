"""One lane: its sequences in order, from any place on, each from the pool of documents whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hfdist.config.data import Packing, TooLong
from hfdist.data.documents.corpus import Pool
from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.cursor import Place, Progress
from hfdist.data.order.mixture import Mixture
from hfdist.data.order.records import Status
from hfdist.data.order.shuffle import LaneOrder
from hfdist.data.packing import sequence
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import Shape, without_tokens
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.data.stream.document_iterator import DocumentIterator
from hfdist.data.stream.multi_lane import MultiLaneReader

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

    def walk(self, pool: int, lane: int, place: Place) -> DocumentIterator:
        """Begin a lane's way through a pool."""
        return DocumentIterator(self.pools[pool], self.orders[pool], lane, place)


class Lane:
    """Gives the sequences of one lane. Open them with `open_lanes`.

    Args:
        plan: of the run.
        lane: number of the lane.
        sequences: of each pool of which something is left.
    """

    def __init__(self, plan: Plan, lane: int, sequences: Mapping[int, Iterator[sequence.Sequence]]) -> None:
        self._plan, self._lane = plan, lane
        self._sequences = dict(sequences)
        self._available = tuple(self._sequences)

    def next(self, sample: int) -> Packed:
        """Give the lane's next sequence.

        Args:
            sample: its number in the run.

        Raises:
            DataError: bad data, or none to train on.
        """
        pool = self._plan.mixture.pick(sample, self._available)
        if pool is None:
            return self._lane, None, without_tokens(self._plan.shape.length, self._plan.shape, Place())
        packed = next(self._sequences[pool])
        # With its last sequence, not when more is asked for: a lane that goes on from here must pick as this one does.
        if self._plan.is_finished(pool, self._lane, packed.next_place):
            del self._sequences[pool]
            self._available = tuple(self._sequences)
        if pool > 0:
            packed.records["pool"] = pool
        return self._lane, pool, packed


def open_lanes(plan: Plan, documents: Documents, progress: Mapping[int, Sequence[Progress]]) -> dict[int, Lane]:
    """Go on where lanes stand.

    Args:
        plan: of the run.
        documents: to read from.
        progress: how far each lane has come in each pool; in the order of their turns.
    """
    sequences: dict[int, dict[int, Iterator[sequence.Sequence]]] = {lane: {} for lane in progress}
    for pool in range(len(plan.pools)):
        places = {lane: pools[pool].place for lane, pools in progress.items()}
        left = {lane: place for lane, place in places.items() if not plan.is_finished(pool, lane, place)}
        # Windows are made of what is read together; end to end it does not matter.
        if plan.packing is Packing.concat and documents.are_token_files(plan.pools[pool]):
            walks = {lane: plan.walk(pool, lane, place) for lane, place in left.items()}
            together = MultiLaneReader(walks, documents, plan.shape)
            for lane in left:
                sequences[lane][pool] = iter(partial(together.next, lane), None)
        else:
            for lane, place in left.items():
                sequences[lane][pool] = _pack(plan, documents, pool, lane, place)
    return {lane: Lane(plan, lane, own) for lane, own in sequences.items()}


def _pack(plan: Plan, documents: Documents, pool: int, lane: int, place: Place) -> Iterator[sequence.Sequence]:
    chunks = _chunks(plan.walk(pool, lane, place), documents)
    key: tuple[int | str, ...] = (plan.seed, plan.pools[pool].name)
    match plan.packing:
        case Packing.concat:
            return concat(chunks, plan.shape)
        case Packing.best_fit:
            return best_fit(chunks, place.offset, plan.shape, (*key, lane))
        case Packing.none:
            return one_each(chunks, place.offset, plan.shape, key)


def _chunks(walk: DocumentIterator, documents: Documents) -> Iterator[tuple[Place, DocumentBatch]]:
    """Documents in a lane's order, epoch after epoch, and where the first of them stands."""
    while len(numbers := walk.rest_of_block()):
        for chunk in documents.chunks(numbers):
            num_documents = len(chunk.numbers)
            trained = np.flatnonzero(chunk.fates == Status.trained)
            num_barren = num_documents - 1 - int(trained[-1]) if len(trained) else num_documents
            place = walk.place
            walk.go_on(num_documents, num_barren)
            yield place, chunk
