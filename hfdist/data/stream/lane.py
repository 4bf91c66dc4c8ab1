"""One lane: gives its sequences in order, from any place on; the mixture says from which pool each one comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hfdist.config.data import Packing
from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.lane_state import Place, Progress
from hfdist.data.packing import sequence
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import without_tokens
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.stream.lane_documents import DocumentIterator, chunks_of
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.data.stream.many_lanes import MultiLaneReader, SequencesInTurn


class LaneSequence(NamedTuple):
    """A sequence, and where it comes from."""

    lane: int
    pool: int | None
    """None: the lane has come to its end."""
    sequence: sequence.Sequence


class Lane:
    """Gives the sequences of one lane: see `open_lanes`."""

    def __init__(self, plan: LanePlan, lane: int, sequences: Mapping[int, Iterator[sequence.Sequence]]) -> None:
        self._plan, self._lane = plan, lane
        self._sequences = dict(sequences)
        self._available = tuple(self._sequences)
        (first, *others) = plan.pools
        self._endless = None if others or first.epochs is not None else self._sequences[0]
        """The only pool's sequences, where they never end."""

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
    """Open lanes, in the order of their turns, at the place that `progress` gives for each pool."""
    sequences: dict[int, dict[int, Iterator[sequence.Sequence]]] = {lane: {} for lane in progress}
    for pool in range(len(plan.pools)):
        places = {lane: pools[pool].place for lane, pools in progress.items()}
        left = {lane: place for lane, place in places.items() if not plan.is_finished(pool, lane, place)}
        # `best_fit` and `none` depend on the chunks that are read; `concat` does not.
        if plan.packing is Packing.concat and plan.pools[pool].holds_tokens:
            iterators = {lane: _open_documents(plan, pool, lane, place) for lane, place in left.items()}
            reader = MultiLaneReader(iterators, documents, plan.shape)
            for lane in left:
                sequences[lane][pool] = iter(partial(reader.next, lane), None)
        else:
            for lane, place in left.items():
                sequences[lane][pool] = _pack(plan, documents, pool, lane, place)
    return {lane: Lane(plan, lane, own) for lane, own in sequences.items()}


def open_turns(
    plan: LanePlan, documents: Documents, places: Mapping[int, Place], batch_size: int
) -> Iterator[SequencesInTurn]:
    """Give the sequences of lanes in the order of their turns, many at once, where `has_even_turns`.

    `places` are those of the lanes in the only pool, in the order of their turns; each item holds whole batches.
    """
    iterators = {lane: _open_documents(plan, 0, lane, place) for lane, place in places.items()}
    return MultiLaneReader(iterators, documents, plan.shape).in_turn(batch_size)


def _pack(plan: LanePlan, documents: Documents, pool: int, lane: int, place: Place) -> Iterator[sequence.Sequence]:
    chunks = chunks_of(_open_documents(plan, pool, lane, place), documents)
    key: tuple[int | str, ...] = (plan.seed, plan.pools[pool].name)
    if plan.packing is Packing.concat:
        return concat(chunks, plan.shape)
    if plan.packing is Packing.none:
        return one_each(chunks, place.offset, plan.shape, key)
    return best_fit(chunks, place.offset, plan.shape, (*key, lane))


def _open_documents(plan: LanePlan, pool: int, lane: int, place: Place) -> DocumentIterator:
    return DocumentIterator(plan.pools[pool], plan.orders[pool], lane, place)
