"""The sequences of many lanes at once, by `concat` from token files: one call of numpy costs much."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequences

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.records import Status
from hfdist.data.packing.concat import CutSequences, Given, LaneDocuments, PackingBuffer
from hfdist.data.packing.sequence import Pieces, Sequence, Shape
from hfdist.data.stream.lane_documents import DocumentIterator
from hfdist.errors import HfdistError

# The most sequences that are made at once, for one lane and for all lanes. Each time `MultiLaneReader` doubles the
# lanes, and then the sequences, so that a first batch comes soon.
_MOST_SEQUENCES, _MOST_SEQUENCES_OF_ALL = 128, 8192
_MOST_DOCUMENTS = 4096
"""Documents of a lane that are read at once: if most documents are skipped, the guess is far too high."""
_ENOUGH_DOCUMENTS = 100_000
"""Documents of all lanes: if one call reads as many, larger calls would not be faster for each, but all would wait."""


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
        self, lanes: Sequences[int], num_turns: int, cut: Callable[[Mapping[int, int], NDArray[np.int64]], CutSequences]
    ) -> None:
        self._lanes, self._num_turns = lanes, num_turns
        counts = turns_of(num_turns, len(lanes))
        self._firsts = list(itertools.accumulate(counts, initial=0))
        """Where each lane begins in the order of the cut."""
        turns = np.concatenate([np.arange(place, num_turns, len(lanes)) for place in range(len(lanes))])
        self._cut = cut(dict(zip(lanes, counts, strict=True)), turns)
        self._taken = self._told = 0
        """Turns that were given, and those of them that `untold` has told."""

    def next(self, count: int) -> Pieces | None:
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
    """Reads and packs the lanes of this process together; the error of a lane comes at its own turn.

    Args:
        iterators: of the documents of each lane, in the order of the lanes' turns.
        documents: reads them.
        shape: of a sequence.
    """

    def __init__(self, iterators: Mapping[int, DocumentIterator], documents: Documents, shape: Shape) -> None:
        self._iterators, self._documents, self._shape = iterators, documents, shape
        self._buffer = PackingBuffer(shape, iterators)
        self._given: dict[int, Iterator[Sequence]] = {lane: iter(()) for lane in iterators}
        """What each lane gives now, and then `_ready`."""
        self._ready: dict[int, deque[Iterator[Sequence]]] = {lane: deque() for lane in iterators}
        self._num_ready = dict.fromkeys(iterators, 0)
        self._num_lanes = self._num_sequences = 1
        self._num_documents, self._num_tokens = 1, shape.length
        """Documents and tokens read so far, to guess how many documents a sequence takes."""

    def next(self, lane: int) -> Sequence | None:
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

    def _add_ready(self, lane: int, sequences: Iterator[Sequence], count: int) -> None:
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
