"""A lane: its packed sequences in order, from any place on, each from the pool that the mixture picks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hfdist.config.data import Packing
from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.lane_state import Place, Progress
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import PackedSequence, without_tokens
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.stream.lane_documents import DocumentIterator, chunks_of
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.data.stream.many_lanes import MultiLaneReader, SequencesInTurn


class LaneSequence(NamedTuple):
    """A packed sequence with the numbers of its lane and of its pool."""

    lane: int
    pool: int | None
    """The number of the pool; None: the lane has come to its end, and the sequence is all filling."""
    sequence: PackedSequence


class Lane:
    """The sequences of one lane, in their order.

    Args:
        plan: what all lanes share.
        lane: the number of this lane.
        sequences: the sequences of each pool that the lane has not finished, by the pool's number.
    """

    def __init__(self, plan: LanePlan, lane: int, sequences: Mapping[int, Iterator[PackedSequence]]) -> None:
        self._plan, self._lane = plan, lane
        self._sequences = dict(sequences)
        self._available = tuple(self._sequences)
        (first, *others) = plan.pools
        self._endless = None if others or first.epochs is not None else self._sequences[0]
        """The sequences of the only pool, where there is one and it never ends: nothing is to be picked."""

    def next(self, sample: int) -> LaneSequence:
        """Give the lane's next sequence, number `sample` of the run; DataError: bad data, or none to train on."""
        if self._endless is not None:
            return LaneSequence(self._lane, 0, next(self._endless))
        pool = self._plan.mixture.pick(sample, self._available)
        if pool is None:
            return LaneSequence(self._lane, None, without_tokens(self._plan.shape.length, self._plan.shape, Place()))
        packed = next(self._sequences[pool])
        # Right after the last sequence, not at the next call: a lane that resumes here must pick the same pool.
        if self._plan.is_finished(pool, self._lane, packed.next_place):
            del self._sequences[pool]
            self._available = tuple(self._sequences)
        if pool > 0:
            packed.records["pool"] = pool
        return LaneSequence(self._lane, pool, packed)


def open_lanes(plan: LanePlan, documents: Documents, progress: Mapping[int, Sequence[Progress]]) -> dict[int, Lane]:
    """Open some lanes at a place.

    Args:
        plan: what all lanes share.
        documents: reads the documents.
        progress: how far each lane has come in each pool, by the lane's number, in the order of the lanes' turns.

    Returns:
        Each lane by its number, in the same order.
    """
    sequences: dict[int, dict[int, Iterator[PackedSequence]]] = {lane: {} for lane in progress}
    for pool in range(len(plan.pools)):
        places = {lane: pools[pool].place for lane, pools in progress.items()}
        left = {lane: place for lane, place in places.items() if not plan.is_finished(pool, lane, place)}
        # Lanes are read together only under `concat`: the sequences of the others depend on how documents are chunked.
        if plan.packing is Packing.concat and plan.pools[pool].holds_tokens:
            iterators = {lane: _open_documents(plan, pool, lane, place) for lane, place in left.items()}
            reader = MultiLaneReader(iterators, documents, plan.shape)
            for lane in left:
                sequences[lane][pool] = iter(partial(reader.next, lane), None)
        else:
            for lane, place in left.items():
                sequences[lane][pool] = _pack(plan, documents, pool, lane, place)
    return {lane: Lane(plan, lane, of_pools) for lane, of_pools in sequences.items()}


def open_turns(
    plan: LanePlan, documents: Documents, places: Mapping[int, Place], batch_size: int
) -> Iterator[SequencesInTurn]:
    """Give the sequences of lanes in the order of the lanes' turns, many at once.

    Args:
        plan: what all lanes share; its `has_even_turns` is true, so that there is one pool.
        documents: reads the documents.
        places: where each lane stands in that pool, by the lane's number, in the order of the lanes' turns.
        batch_size: sequences in a batch.

    Returns:
        Groups of sequences, each of whole batches.
    """
    iterators = {lane: _open_documents(plan, 0, lane, place) for lane, place in places.items()}
    return MultiLaneReader(iterators, documents, plan.shape).in_turn(batch_size)


def _pack(plan: LanePlan, documents: Documents, pool: int, lane: int, place: Place) -> Iterator[PackedSequence]:
    """Give the sequences of one pool in a lane, from `place` on, by the packing of the plan."""
    chunks = chunks_of(_open_documents(plan, pool, lane, place), documents)
    key: tuple[int | str, ...] = (plan.seed, plan.pools[pool].name)
    if plan.packing is Packing.concat:
        return concat(chunks, plan.shape)
    if plan.packing is Packing.none:
        return one_each(chunks, place.offset, plan.shape, key)
    return best_fit(chunks, place.offset, plan.shape, (*key, lane))


def _open_documents(plan: LanePlan, pool: int, lane: int, place: Place) -> DocumentIterator:
    return DocumentIterator(plan.pools[pool], plan.orders[pool], lane, place)
