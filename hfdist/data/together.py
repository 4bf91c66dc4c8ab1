"""Documents of token files, end to end, for many lanes at once: a call costs as much as hundreds of documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

from hfdist.data.documents import Documents
from hfdist.data.packing.concat import Share, Waiting
from hfdist.data.packing.sequence import Sequence, Shape
from hfdist.data.records import Fate
from hfdist.data.walk import Walk

# Of each lane, and of all: twice as many lanes, then sequences, each time, so that a first batch comes soon.
_MOST_SEQUENCES, _MOST_TOGETHER = 64, 4096


class Together:
    """Gives the sequences of lanes that take turns.

    Args:
        walks: of each lane, in the order of their turns.
        documents: to read from.
        shape: of sequences.
    """

    def __init__(self, walks: Mapping[int, Walk], documents: Documents, shape: Shape) -> None:
        self._walks, self._documents, self._shape = walks, documents, shape
        self._waiting = Waiting(shape, walks)
        self._ready: dict[int, deque[Iterator[Sequence]]] = {lane: deque() for lane in walks}
        self._num_ready = dict.fromkeys(walks, 0)
        self._num_lanes = self._num_sequences = 1
        self._num_documents, self._num_tokens = 1, shape.length
        """Read so far, to guess how many documents a sequence takes."""

    def next(self, lane: int) -> Sequence | None:
        """Give the next one of a lane; None: it has come to its end.

        Raises:
            DataError, CheckpointError: see `Walk` and `Waiting`.
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
        self._read(lanes)
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
        else:
            most = max(_MOST_TOGETHER // len(self._walks), 1)
            self._num_sequences = min(2 * self._num_sequences, _MOST_SEQUENCES, most)

    def _give(self, lane: int, sequences: Iterator[Sequence], count: int) -> None:
        self._ready[lane].append(sequences)
        self._num_ready[lane] += count

    def _read(self, lanes: list[int]) -> None:
        """Read until each of the lanes has the sequences that are made together now, or has come to its end."""
        while lanes := [lane for lane in lanes if self._waiting.num_sequences(lane) < self._num_sequences]:
            numbers = {lane: self._walks[lane].next_documents(self._num_needed(lane)) for lane in lanes}
            lanes = [lane for lane in lanes if len(numbers[lane])]
            if not lanes:
                return
            portion = self._documents.tokens_at_once(np.concatenate([numbers[lane] for lane in lanes]))
            ends = np.cumsum([len(numbers[lane]) for lane in lanes])
            trained = np.flatnonzero(portion.fates == Fate.trained)
            lasts = np.searchsorted(trained, ends)
            shares = []
            behind = ends - 1 - np.concatenate([[-1], trained])[lasts]
            for lane, num_barren in zip(lanes, behind.tolist(), strict=True):
                num_documents = len(numbers[lane])
                place = self._walks[lane].go_on(num_documents, min(num_barren, num_documents))
                shares.append(Share(lane, place, num_documents))
            self._waiting.add(portion, shares)
            self._num_documents += len(portion.numbers)
            self._num_tokens += int(portion.lengths.sum())

    def _num_needed(self, lane: int) -> int:
        """Documents that a lane needs, by the mean of those read so far."""
        num_sequences = self._num_sequences - self._waiting.num_sequences(lane)
        return -(-num_sequences * self._shape.length * self._num_documents // self._num_tokens)
