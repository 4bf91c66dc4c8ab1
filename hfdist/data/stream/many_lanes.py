"""Many lanes of token files read and packed together: a call of numpy costs as much as hundreds of documents."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.records import Status
from hfdist.data.packing.concat import CutSequences, Given, LaneDocuments, PackingBuffer
from hfdist.data.packing.sequence import PackedSequence, Pieces, Shape
from hfdist.data.stream.lane_documents import DocumentIterator
from hfdist.errors import HfdistError

# The most sequences that are made at once, for one lane and for all lanes. A `MultiLaneReader` begins with one lane and
# one sequence, and doubles first the lanes and then the sequences, so that a first batch comes soon.
_MOST_SEQUENCES, _MOST_SEQUENCES_OF_ALL = 128, 8192
_MOST_DOCUMENTS = 4096
"""The most documents of a lane that are read at once: where most are skipped, the guess of the number is too high."""
_ENOUGH_DOCUMENTS = 100_000
"""Documents in one call after which calls grow no more: larger ones would be no faster, and the first batch waits."""


class SequencesInTurn:
    """Sequences of lanes that take turns, kept in columns: an object for each would be most of the cost of reading.

        turns    0 1 2 3 4 5 6         pieces stand in this order: those of a batch are neighbours
        lanes    a b c a b c a
        cut      a a a | b b | c c     records stand in this order: those of a lane are neighbours

    Args:
        lanes: numbers of the lanes in the order of their turns; the first one has the first turn.
        num_turns: the number of sequences in all.
        cut: makes the sequences: it gets the number of turns of each lane, and the turn of each sequence in the order
            of the cut, shape [turns].
    """

    def __init__(
        self, lanes: Sequence[int], num_turns: int, cut: Callable[[Mapping[int, int], NDArray[np.int64]], CutSequences]
    ) -> None:
        self._lanes, self._num_turns = lanes, num_turns
        counts = turns_of(num_turns, len(lanes))
        self._firsts = list(itertools.accumulate(counts, initial=0))
        """The number of each lane's first sequence in the order of the cut; at the end, the number of all sequences."""
        turns = np.concatenate([np.arange(place, num_turns, len(lanes)) for place in range(len(lanes))])
        self._cut = cut(dict(zip(lanes, counts, strict=True)), turns)
        self._num_taken = 0
        """Turns whose sequences `next` has given."""
        self._num_told = 0
        """Turns of these that `untold` has told."""

    def next(self, count: int) -> Pieces | None:
        """Give the next `count` sequences end to end, for `sequence.stack`; None: there are no more."""
        first = self._num_taken
        if first == self._num_turns:
            return None
        self._num_taken += count
        return self._cut.pieces(first, self._num_taken)

    def untold(self) -> Iterator[tuple[int, Given]]:
        """Give each lane that has given sequences since the last call, by its number, and what it has given."""
        before, after = turns_of(self._num_told, len(self._lanes)), turns_of(self._num_taken, len(self._lanes))
        self._num_told = self._num_taken
        for lane, first, start, stop in zip(self._lanes, self._firsts, before, after, strict=False):
            if stop > start:
                yield lane, self._cut.given(first + start, first + stop)


def turns_of(num_turns: int, num_lanes: int) -> list[int]:
    """Give the number of turns that each lane has, if lanes take `num_turns` turns one after the other."""
    rounds, num_with_one_more = divmod(num_turns, num_lanes)
    return [rounds + 1] * num_with_one_more + [rounds] * (num_lanes - num_with_one_more)


class MultiLaneReader:
    """A reader that packs the lanes of this process together; the error of a lane comes at the lane's own turn.

    Args:
        iterators: the document iterator of each lane, by the lane's number, in the order of the lanes' turns.
        documents: reads the documents.
        shape: the shape of a sequence.
    """

    def __init__(self, iterators: Mapping[int, DocumentIterator], documents: Documents, shape: Shape) -> None:
        self._iterators, self._documents, self._shape = iterators, documents, shape
        self._buffer = PackingBuffer(shape, iterators)
        self._given: dict[int, Iterator[PackedSequence]] = {lane: iter(()) for lane in iterators}
        """The sequences that each lane gives now."""
        self._ready: dict[int, deque[Iterator[PackedSequence]]] = {lane: deque() for lane in iterators}
        """The sequences that each lane gives after those in `_given`: an item for each time it was packed."""
        self._num_ready = dict.fromkeys(iterators, 0)
        """The number of sequences that each lane has in `_given` and `_ready`."""
        self._num_lanes = self._num_sequences = 1
        """How many lanes are packed at once now, and how many sequences of each."""
        self._num_documents, self._num_tokens = 1, shape.length
        """Documents and tokens read so far, to guess how many documents a sequence takes."""

    def next(self, lane: int) -> PackedSequence | None:
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
        """Give the lane `first`, then lanes after it with few sequences left: as many as are packed at once now."""
        lanes = list(self._iterators)
        place = lanes.index(first)
        few = self._num_sequences // 4
        lacking = [lane for lane in [*lanes[place:], *lanes[:place]] if self._num_ready[lane] <= few]
        return lacking[: self._num_lanes]

    def _pack(self, lanes: list[int]) -> None:
        """Read and pack the next sequences of some lanes; of the first one only, if there is an error."""
        num_before = self._num_documents
        try:
            self._read(dict.fromkeys(lanes, self._num_sequences))
        except HfdistError:
            # The error may belong to a lane whose turn is later: read only the one sequence that is needed now.
            lanes = lanes[:1]
            self._read(dict.fromkeys(lanes, 1))
        self._cut(lanes)
        self._grow(self._num_documents - num_before)

    def _cut(self, lanes: list[int]) -> None:
        """Make ready what the buffer has of some lanes: whole sequences, or the filled-up rest of a lane that ends."""
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

    def _grow(self, num_documents: int) -> None:
        """Pack more at once the next time: more lanes, then more sequences, unless this one read enough documents."""
        if self._num_lanes < len(self._iterators):
            self._num_lanes *= 2
        elif num_documents < _ENOUGH_DOCUMENTS:
            most = max(_MOST_SEQUENCES_OF_ALL // len(self._iterators), 1)
            self._num_sequences = min(2 * self._num_sequences, _MOST_SEQUENCES, most)

    def _add_ready(self, lane: int, sequences: Iterator[PackedSequence], count: int) -> None:
        self._ready[lane].append(sequences)
        self._num_ready[lane] += count

    def in_turn(self, batch_size: int) -> Iterator[SequencesInTurn]:
        """Give all sequences in the order of the lanes' turns; no lane may end, and an error comes at its batch's turn.

        Each item holds whole batches of `batch_size` sequences: one at first, then twice as many each time.
        """
        lanes, num_turns = list(self._iterators), batch_size
        while True:
            num_before = self._num_documents
            try:
                self._read(dict(zip(lanes, turns_of(num_turns, len(lanes)), strict=True)))
            except HfdistError:
                if num_turns == batch_size:
                    raise
                # The error may belong to a later batch: read only the one that is needed now.
                num_turns = batch_size
                continue
            yield SequencesInTurn(lanes, num_turns, self._buffer.cut)
            next_place = num_turns % len(lanes)
            lanes = [*lanes[next_place:], *lanes[:next_place]]
            if self._num_documents - num_before < _ENOUGH_DOCUMENTS:
                most = min(_MOST_SEQUENCES * len(lanes), _MOST_SEQUENCES_OF_ALL)
                most_in_whole_batches = most - most % batch_size
                num_turns = max(min(2 * num_turns, most_in_whole_batches), batch_size)

    def _read(self, wanted: Mapping[int, int]) -> None:
        """Read documents until each lane in `wanted` has so many sequences in the buffer, or has ended."""
        lanes = list(wanted)
        for num_passes in itertools.count():
            lanes = [lane for lane in lanes if self._buffer.num_sequences(lane) < wanted[lane]]
            numbers = {}
            for lane in lanes:
                guess = self._guess(wanted[lane] - self._buffer.num_sequences(lane))
                # The next documents may be shorter than those before: more in each pass, so that passes stay few.
                most = min(max(guess, 2**num_passes), _MOST_DOCUMENTS)
                numbers[lane] = self._iterators[lane].next_documents(most)
            lanes = [lane for lane in lanes if len(numbers[lane])]
            if not lanes:
                return
            self._take({lane: numbers[lane] for lane in lanes})

    def _take(self, numbers: Mapping[int, NDArray[np.int64]]) -> None:
        """Read the next documents of lanes, by their numbers, into the buffer; none is taken if there is an error."""
        chunk = self._documents.tokens_at_once(np.concatenate(list(numbers.values())))
        lanes = [LaneDocuments(lane, self._iterators[lane].place, len(read)) for lane, read in numbers.items()]
        self._buffer.add(chunk, lanes)
        ends = np.cumsum([lane.num_documents for lane in lanes])
        trained = np.flatnonzero(chunk.fates == Status.trained)
        # The last document of the chunk before each lane's end that is trained on, perhaps another lane's; -1: none.
        last_trained = np.concatenate([[-1], trained])[np.searchsorted(trained, ends)]
        for (lane, _, count), num_barren in zip(lanes, (ends - 1 - last_trained).tolist(), strict=True):
            self._iterators[lane].advance(count, min(num_barren, count))
        self._num_documents += len(chunk.numbers)
        self._num_tokens += int(chunk.lengths.sum())

    def _guess(self, num_sequences: int) -> int:
        """Guess how many documents so many sequences take, from the mean length of the documents so far.

        The guess is an eighth too high: what is left over is read already, and too few need a whole pass more.
        """
        num_tokens = num_sequences * self._shape.length
        return -(-9 * num_tokens * self._num_documents // (8 * self._num_tokens))
