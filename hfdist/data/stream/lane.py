"""One lane: gives its sequences in order, from any place on; the mixture says from which pool each one comes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import Packing, TooLong
from hfdist.data.documents.corpus import Pool
from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.lane_state import Place, Progress
from hfdist.data.order.records import Status
from hfdist.data.order.shuffle import LaneOrder, Mixture
from hfdist.data.packing import sequence
from hfdist.data.packing.concat import CutSequences, Given, LaneDocuments, PackingBuffer, concat
from hfdist.data.packing.sequence import Shape, without_tokens
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import DataError, HfdistError

# A lane without a document to train on gives up after so many epochs and documents: a short lane may have only held-out
# ones, or a damaged file.
_MOST_BARREN_EPOCHS, _MOST_BARREN_DOCUMENTS = 10, 1000
# The most sequences that a `MultiLaneReader` makes at once, for one lane and for all lanes. Each time it doubles the
# lanes, and then the sequences, so that a first batch comes soon.
_MOST_SEQUENCES, _MOST_SEQUENCES_OF_ALL = 128, 8192
# The most documents of a lane that it reads at once: if most documents are skipped, its guess is far too high.
_MOST_DOCUMENTS = 4096
# Numbers of documents that are worked out at once, as a multiple of those that are needed: a call costs as much as
# hundreds of numbers.
_TIMES_AHEAD = 4
# Of all lanes: if one call reads this many, larger calls would not be faster for each document, but all would wait.
_ENOUGH_DOCUMENTS = 100_000


class Packed(NamedTuple):
    """A sequence, and where it comes from."""

    lane: int
    pool: int | None
    """None: the lane has come to its end."""
    sequence: sequence.Sequence


@dataclass(frozen=True)
class LanePlan:
    """What all lanes share: the order of each pool, the mixture of pools, and how sequences are packed."""

    pools: Sequence[Pool]
    orders: Sequence[LaneOrder]
    """Order of each pool."""
    mixture: Mixture
    packing: Packing
    too_long: TooLong
    shape: Shape
    seed: int

    def is_finished(self, pool: int, lane: int, place: Place) -> bool:
        """Whether a lane has come to the end of a pool: nothing is left of the last epoch that it may have."""
        limit = self.pools[pool].epochs
        return limit is not None and place[:2] >= (limit - 1, self.orders[pool].lane_length(limit - 1, lane))

    @property
    def has_even_turns(self) -> bool:
        """Whether each sequence is the next one of one endless pool of tokens: see `open_turns`."""
        (first, *others) = self.pools
        return not others and first.epochs is None and first.holds_tokens and self.packing is Packing.concat

    def documents(self, pool: int, lane: int, place: Place) -> DocumentIterator:
        """Iterate over a lane's documents of a pool, from a place on."""
        return DocumentIterator(self.pools[pool], self.orders[pool], lane, place)


class Lane:
    """Gives the sequences of one lane: see `open_lanes`."""

    def __init__(self, plan: LanePlan, lane: int, sequences: Mapping[int, Iterator[sequence.Sequence]]) -> None:
        self._plan, self._lane = plan, lane
        self._sequences = dict(sequences)
        self._available = tuple(self._sequences)
        (first, *others) = plan.pools
        self._endless = None if others or first.epochs is not None else self._sequences[0]
        """The only pool's sequences, where they never end."""

    def next(self, sample: int) -> Packed:
        """Give the lane's next sequence, number `sample` of the run; DataError: bad data, or none to train on."""
        if self._endless is not None:
            return Packed(self._lane, 0, next(self._endless))
        pool = self._plan.mixture.pick(sample, self._available)
        if pool is None:
            return Packed(self._lane, None, without_tokens(self._plan.shape.length, self._plan.shape, Place()))
        packed = next(self._sequences[pool])
        # Right after the last sequence, not at the next call: a lane that resumes here must pick the same pool.
        if self._plan.is_finished(pool, self._lane, packed.next_place):
            del self._sequences[pool]
            self._available = tuple(self._sequences)
        if pool > 0:
            packed.records["pool"] = pool
        return Packed(self._lane, pool, packed)


def open_lanes(plan: LanePlan, documents: Documents, progress: Mapping[int, Sequence[Progress]]) -> dict[int, Lane]:
    """Open lanes, in the order of their turns, at the place that `progress` gives for each pool."""
    sequences: dict[int, dict[int, Iterator[sequence.Sequence]]] = {lane: {} for lane in progress}
    for pool in range(len(plan.pools)):
        places = {lane: pools[pool].place for lane, pools in progress.items()}
        left = {lane: place for lane, place in places.items() if not plan.is_finished(pool, lane, place)}
        # `best_fit` and `none` depend on the chunks that are read; `concat` does not.
        if plan.packing is Packing.concat and plan.pools[pool].holds_tokens:
            iterators = {lane: plan.documents(pool, lane, place) for lane, place in left.items()}
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
    iterators = {lane: plan.documents(0, lane, place) for lane, place in places.items()}
    return MultiLaneReader(iterators, documents, plan.shape).in_turn(batch_size)


def _pack(plan: LanePlan, documents: Documents, pool: int, lane: int, place: Place) -> Iterator[sequence.Sequence]:
    chunks = _chunks(plan.documents(pool, lane, place), documents)
    key: tuple[int | str, ...] = (plan.seed, plan.pools[pool].name)
    if plan.packing is Packing.concat:
        return concat(chunks, plan.shape)
    if plan.packing is Packing.none:
        return one_each(chunks, place.offset, plan.shape, key)
    return best_fit(chunks, place.offset, plan.shape, (*key, lane))


def _chunks(iterator: DocumentIterator, documents: Documents) -> Iterator[tuple[Place, DocumentBatch]]:
    """Give chunks of documents in a lane's order, epoch after epoch, each with the place of its first document."""
    while len(numbers := iterator.next_documents()):
        for chunk in documents.chunks(numbers):
            num_documents = len(chunk.numbers)
            trained = np.flatnonzero(chunk.fates == Status.trained)
            num_barren = num_documents - 1 - int(trained[-1]) if len(trained) else num_documents
            place = iterator.place
            iterator.advance(num_documents, num_barren)
            yield place, chunk


class DocumentIterator:
    """Iterates over the documents of a pool in a lane, epoch after epoch."""

    def __init__(self, pool: Pool, order: LaneOrder, lane: int, place: Place) -> None:
        self._pool, self._order, self._lane = pool, order, lane
        self.place = place
        """The place of the next document; only the first place can have an offset."""
        self._barren_epochs = self._barren_documents = 0
        self._numbers = np.empty(0, dtype=np.int64)
        """Documents from the place on, of the same epoch."""

    def next_documents(self, most: int | None = None) -> NDArray[np.int64]:
        """Give the canonical numbers of the next documents; they stay the next ones until `advance`.

        At most `most`, from several blocks; None: the rest of a block, which is cheap to read together. No number: the
        last epoch has ended. DataError: there is nothing to train on.
        """
        limit = self._pool.epochs
        while not len(self._numbers) and (limit is None or self.place.epoch < limit):
            if self.place.position < self._order.lane_length(self.place.epoch, self._lane):
                self._numbers = self._after(0, most)
            else:
                self._end_epoch()
        if most is not None and 0 < len(self._numbers) < most:
            self._numbers = np.concatenate([self._numbers, self._after(len(self._numbers), most)])
        return self._numbers[:most]

    def _after(self, num_documents: int, most: int | None) -> NDArray[np.int64]:
        """Give the documents of this epoch that come after so many next ones, a few times `most` if there are."""
        epoch, position = self.place.epoch, self.place.position + num_documents
        if position >= self._order.lane_length(epoch, self._lane):
            return self._numbers[:0]
        least = 1 if most is None else _TIMES_AHEAD * most
        return self._order.rest_of_blocks(epoch, self._lane, position, least)

    def advance(self, num_documents: int, num_barren: int) -> None:
        """Move past the next documents, of which `num_barren` come after the last one to train on."""
        self._numbers = self._numbers[num_documents:]
        self.place = Place(self.place.epoch, self.place.position + num_documents)
        if num_barren < num_documents:
            self._barren_epochs, self._barren_documents = -1, 0
        self._barren_documents += num_barren

    def _end_epoch(self) -> None:
        """Begin the next epoch; an error leaves the place as it was, so that the next call raises it again."""
        num_barren = self._barren_epochs + 1
        is_barren = num_barren >= _MOST_BARREN_EPOCHS and self._barren_documents >= _MOST_BARREN_DOCUMENTS
        if self._pool.epochs is None and is_barren:
            where = f"lane {self._lane}, {self._pool.name}"
            raise DataError("a lane has no training documents", where=where, hint="fewer data.lanes")
        self.place, self._barren_epochs = Place(self.place.epoch + 1), num_barren


class SequencesInTurn:
    """Sequences of lanes that take turns, in columns: an object for each would be most of what reading tokens costs.

        turns    0 1 2 3 4 5 6         pieces stand in this order: those of a batch are neighbours
        lanes    a b c a b c a
        cut      a a a | b b | c c     records stand in this order: those of a lane are neighbours

    Args:
        lanes: in the order of their turns; the first one has the first turn.
        num_turns: sequences in all.
        cut: takes as many sequences of each lane as it has turns, and the turn of each sequence; shape [turns].
    """

    def __init__(
        self, lanes: Sequence[int], num_turns: int, cut: Callable[[Mapping[int, int], NDArray[np.int64]], CutSequences]
    ) -> None:
        self._lanes, self._num_turns = lanes, num_turns
        counts = turns_of(num_turns, len(lanes))
        self._firsts = list(itertools.accumulate(counts, initial=0))
        """Where each lane begins in the order of the cut."""
        turns = np.concatenate([np.arange(place, num_turns, len(lanes)) for place in range(len(lanes))])
        self._cut = cut(dict(zip(lanes, counts, strict=True)), turns)
        self._taken = self._told = 0
        """Turns that were given, and those of them that `untold` has told."""

    def next(self, count: int) -> sequence.Pieces | None:
        """Give the next sequences end to end, for `sequence.stack`; None: there are no more."""
        first = self._taken
        if first == self._num_turns:
            return None
        self._taken += count
        return self._cut.pieces(first, self._taken)

    def untold(self) -> Iterator[tuple[int, Given]]:
        """Give what each lane has given since the last call."""
        before, after = (turns_of(number, len(self._lanes)) for number in (self._told, self._taken))
        self._told = self._taken
        for lane, first, start, stop in zip(self._lanes, self._firsts, before, after, strict=False):
            if stop > start:
                yield lane, self._cut.given(first + start, first + stop)


def turns_of(num_turns: int, num_lanes: int) -> list[int]:
    """How many of the first turns each of some lanes has."""
    each, more = divmod(num_turns, num_lanes)
    return [each + (place < more) for place in range(num_lanes)]


class MultiLaneReader:
    """Gives the sequences of lanes that take turns, by `concat` from token files; a lane's errors come at its own turn.

    It reads and packs many lanes at once, because one numpy call costs as much as hundreds of documents. `iterators`
    are in the order of the lanes' turns.
    """

    def __init__(self, iterators: Mapping[int, DocumentIterator], documents: Documents, shape: Shape) -> None:
        self._iterators, self._documents, self._shape = iterators, documents, shape
        self._buffer = PackingBuffer(shape, iterators)
        self._given: dict[int, Iterator[sequence.Sequence]] = {lane: iter(()) for lane in iterators}
        """What each lane gives now, and then `_ready`."""
        self._ready: dict[int, deque[Iterator[sequence.Sequence]]] = {lane: deque() for lane in iterators}
        self._num_ready = dict.fromkeys(iterators, 0)
        self._num_lanes = self._num_sequences = 1
        self._num_documents, self._num_tokens = 1, shape.length
        """Documents and tokens read so far, to guess how many documents a sequence takes."""

    def next(self, lane: int) -> sequence.Sequence | None:
        """Give the next sequence of a lane, or raise its error; None: the lane has ended."""
        while (packed := next(self._given[lane], None)) is None:
            if not self._ready[lane]:
                self._pack(self._lacking(lane))
            if not self._ready[lane]:
                return None
            self._given[lane] = self._ready[lane].popleft()
        self._num_ready[lane] -= 1
        return packed

    def _lacking(self, first: int) -> list[int]:
        """Give the lane `first` and the next lanes that need more soon: as many as are packed at once now."""
        lanes = list(self._iterators)
        place = lanes.index(first)
        few = self._num_sequences // 4
        lacking = [lane for lane in [*lanes[place:], *lanes[:place]] if self._num_ready[lane] <= few]
        return lacking[: self._num_lanes]

    def _pack(self, lanes: list[int]) -> None:
        before = self._num_documents
        try:
            self._read(dict.fromkeys(lanes, self._num_sequences))
        except HfdistError:
            # The error may belong to a lane whose turn is later: read only the one sequence that is needed now.
            lanes = lanes[:1]
            self._read(dict.fromkeys(lanes, 1))
        counts = {lane: min(self._buffer.num_sequences(lane), self._num_sequences) for lane in lanes}
        if any(counts.values()):
            cut = self._buffer.cut(counts)
            stop = 0
            for lane, count in counts.items():
                start, stop = stop, stop + count
                self._add_ready(lane, cut.sequences(start, stop), count)
        for lane, count in counts.items():
            if not count and self._buffer.num_documents(lane):
                self._add_ready(lane, iter([self._buffer.rest(lane)]), 1)
        if self._num_lanes < len(self._iterators):
            self._num_lanes *= 2
        elif self._num_documents - before < _ENOUGH_DOCUMENTS:
            most = max(_MOST_SEQUENCES_OF_ALL // len(self._iterators), 1)
            self._num_sequences = min(2 * self._num_sequences, _MOST_SEQUENCES, most)

    def _add_ready(self, lane: int, sequences: Iterator[sequence.Sequence], count: int) -> None:
        self._ready[lane].append(sequences)
        self._num_ready[lane] += count

    def in_turn(self, batch_size: int) -> Iterator[SequencesInTurn]:
        """Give all sequences in the order of the lanes' turns, where no lane ends; the error of a batch at its turn."""
        lanes, num_turns = list(self._iterators), batch_size
        while True:
            before = self._num_documents
            try:
                self._read(dict(zip(lanes, turns_of(num_turns, len(lanes)), strict=True)))
            except HfdistError:
                if num_turns == batch_size:
                    raise
                # It may belong to a later batch.
                num_turns = batch_size
                continue
            yield SequencesInTurn(lanes, num_turns, self._buffer.cut)
            place = num_turns % len(lanes)
            lanes = [*lanes[place:], *lanes[:place]]
            most = min(_MOST_SEQUENCES * len(lanes), _MOST_SEQUENCES_OF_ALL)
            if self._num_documents - before < _ENOUGH_DOCUMENTS:
                num_turns = max(min(2 * num_turns, most - most % batch_size), batch_size)

    def _read(self, wanted: Mapping[int, int]) -> None:
        """Read until each of some lanes has as many sequences as are wanted of it, or has ended."""
        lanes = list(wanted)
        for num_passes in itertools.count():
            lanes = [lane for lane in lanes if self._buffer.num_sequences(lane) < wanted[lane]]
            numbers = {}
            for lane in lanes:
                guess = self._guess(wanted[lane] - self._buffer.num_sequences(lane))
                # The next documents may be shorter than those before.
                numbers[lane] = self._iterators[lane].next_documents(min(max(guess, 2**num_passes), _MOST_DOCUMENTS))
            lanes = [lane for lane in lanes if len(numbers[lane])]
            if not lanes:
                return
            self._take({lane: numbers[lane] for lane in lanes})

    def _take(self, numbers: Mapping[int, NDArray[np.int64]]) -> None:
        """Read the next documents of lanes; none is taken if there is an error."""
        chunk = self._documents.tokens_at_once(np.concatenate(list(numbers.values())))
        counts = {lane: len(own) for lane, own in numbers.items()}
        self._buffer.add(
            chunk, [LaneDocuments(lane, self._iterators[lane].place, count) for lane, count in counts.items()]
        )
        ends = np.cumsum(list(counts.values()))
        trained = np.flatnonzero(chunk.fates == Status.trained)
        lasts = np.concatenate([[-1], trained])[np.searchsorted(trained, ends)]
        for (lane, count), num_barren in zip(counts.items(), (ends - 1 - lasts).tolist(), strict=True):
            self._iterators[lane].advance(count, min(num_barren, count))
        self._num_documents += len(chunk.numbers)
        self._num_tokens += int(chunk.lengths.sum())

    def _guess(self, num_sequences: int) -> int:
        """Guess how many documents the sequences take, from the mean length of the documents so far.

        A few too many: what is left over is read already, and too few need a whole pass more.
        """
        return -(-num_sequences * self._shape.length * self._num_documents * 9 // (8 * self._num_tokens))
