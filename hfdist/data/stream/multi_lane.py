"""Documents of token files, end to end, for many lanes at once: a call costs as much as hundreds of documents."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.records import Status
from hfdist.data.packing.packing_buffer import PackingBuffer, Share
from hfdist.data.packing.sequence import Sequence, Shape
from hfdist.data.stream.document_iterator import DocumentIterator
from hfdist.errors import HfdistError

# Of each lane, and of all: twice as many lanes, then sequences, each time, so that a first batch comes soon.
_MOST_SEQUENCES, _MOST_TOGETHER = 64, 4096
# Of a lane, read at a time: where most documents are passed over, the guess of how many it takes is far too high.
_MOST_DOCUMENTS = 4096
# Of all lanes: with more in what is made together, making more would take as long for each, and all would wait longer.
_ENOUGH_DOCUMENTS = 100_000


class MultiLaneReader:
    """Gives the sequences of lanes that take turns, and each lane's errors at its own turn.

    Args:
        walks: of each lane, in the order of their turns.
        documents: to read from.
        shape: of sequences.
    """

    def __init__(self, walks: Mapping[int, DocumentIterator], documents: Documents, shape: Shape) -> None:
        self._walks, self._documents, self._shape = walks, documents, shape
        self._waiting = PackingBuffer(shape, walks)
        self._ready: dict[int, deque[Iterator[Sequence]]] = {lane: deque() for lane in walks}
        self._num_ready = dict.fromkeys(walks, 0)
        self._num_lanes = self._num_sequences = 1
        self._num_documents, self._num_tokens = 1, shape.length
        """Read so far, to guess how many documents a sequence takes."""

    def next(self, lane: int) -> Sequence | None:
        """Give the next one of a lane; None: it has come to its end.

        Raises:
            DataError, CheckpointError: see `DocumentIterator` and `PackingBuffer`.
        """
        if not self._num_ready[lane]:
            self._make(self._lacking(lane))
        ready = self._ready[lane]
        while ready:
            if (sequence := next(ready[0], None)) is not None:
                self._num_ready[lane] -= 1
                return sequence
            ready.popleft()
        return None

    def _lacking(self, first: int) -> list[int]:
        """A lane and those behind it that will need more soon, as many as are made together now."""
        lanes = list(self._walks)
        place = lanes.index(first)
        few = self._num_sequences // 4
        lacking = [lane for lane in [*lanes[place:], *lanes[:place]] if self._num_ready[lane] <= few]
        return lacking[: self._num_lanes]

    def _make(self, lanes: list[int]) -> None:
        before = self._num_documents
        try:
            self._read(lanes, self._num_sequences)
        except HfdistError:
            # Perhaps another lane's, and before its time: the one that is asked needs one sequence now.
            lanes = lanes[:1]
            self._read(lanes, 1)
        counts = {lane: min(self._waiting.num_sequences(lane), self._num_sequences) for lane in lanes}
        if any(counts.values()):
            cut = self._waiting.cut(counts)
            stop = 0
            for lane, count in counts.items():
                start, stop = stop, stop + count
                self._give(lane, map(cut.sequence, range(start, stop)), count)
        for lane, count in counts.items():
            if not count and self._waiting.num_documents(lane):
                self._give(lane, iter([self._waiting.rest(lane)]), 1)
        if self._num_lanes < len(self._walks):
            self._num_lanes *= 2
        elif self._num_documents - before < _ENOUGH_DOCUMENTS:
            most = max(_MOST_TOGETHER // len(self._walks), 1)
            self._num_sequences = min(2 * self._num_sequences, _MOST_SEQUENCES, most)

    def _give(self, lane: int, sequences: Iterator[Sequence], count: int) -> None:
        self._ready[lane].append(sequences)
        self._num_ready[lane] += count

    def _read(self, lanes: list[int], num_sequences: int) -> None:
        """Read until each of the lanes has so many sequences, or has come to its end."""
        for num_passes in itertools.count():
            lanes = [lane for lane in lanes if self._waiting.num_sequences(lane) < num_sequences]
            numbers = {}
            for lane in lanes:
                guess = self._guess(num_sequences - self._waiting.num_sequences(lane))
                # The next documents may be shorter than those before.
                numbers[lane] = self._walks[lane].next_documents(min(max(guess, 2**num_passes), _MOST_DOCUMENTS))
            lanes = [lane for lane in lanes if len(numbers[lane])]
            if not lanes:
                return
            self._take({lane: numbers[lane] for lane in lanes})

    def _take(self, numbers: Mapping[int, NDArray[np.int64]]) -> None:
        """Read the next documents of lanes; none is taken if there is an error."""
        chunk = self._documents.tokens_at_once(np.concatenate(list(numbers.values())))
        counts = {lane: len(own) for lane, own in numbers.items()}
        self._waiting.add(chunk, [Share(lane, self._walks[lane].place, count) for lane, count in counts.items()])
        ends = np.cumsum(list(counts.values()))
        trained = np.flatnonzero(chunk.fates == Status.trained)
        lasts = np.concatenate([[-1], trained])[np.searchsorted(trained, ends)]
        for (lane, count), num_barren in zip(counts.items(), (ends - 1 - lasts).tolist(), strict=True):
            self._walks[lane].go_on(count, min(num_barren, count))
        self._num_documents += len(chunk.numbers)
        self._num_tokens += int(chunk.lengths.sum())

    def _guess(self, num_sequences: int) -> int:
        """Documents that sequences take, by the mean of those read so far."""
        return -(-num_sequences * self._shape.length * self._num_documents // self._num_tokens)
