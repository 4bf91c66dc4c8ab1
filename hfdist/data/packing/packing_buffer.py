"""Documents, of one lane or of many, that wait until they make whole sequences end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.cursor import Place
from hfdist.data.packing.sequence import Sequence, Shape, filling
from hfdist.data.packing.split import Cut, Integers, Items
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import CheckpointError, DataError

_FIRST, _LENGTHS, _STARTS = map(Items._fields.index, ("first", "lengths", "starts"))


class Share(NamedTuple):
    """Documents of a chunk that are one lane's."""

    lane: int
    place: Place
    """Of the first of them; its offset is the first token that is still to be used."""
    num_documents: int


class PackingBuffer:
    """Documents of some lanes, or what is left of them, that are in no sequence yet.

    Args:
        shape: of sequences.
        lanes: numbers of the lanes.
    """

    def __init__(self, shape: Shape, lanes: Iterable[int]) -> None:
        self._shape = shape
        self._columns = {lane: np.empty((len(Items._fields), 0), dtype=np.int64) for lane in lanes}
        """Those of `Items`."""
        self._num_tokens = dict.fromkeys(self._columns, 0)
        self._arrays: dict[int, NDArray[Any]] = {}
        """Tokens, by number."""
        self._num_arrays = 0
        self._errors: dict[tuple[int, int], DataError] = {}
        """Of bad documents, by epoch and number."""

    def num_documents(self, lane: int) -> int:
        """Of a lane, those passed over included."""
        return self._columns[lane].shape[1]

    def num_sequences(self, lane: int) -> int:
        """Whole ones, that its documents make."""
        return self._num_tokens[lane] // self._shape.length

    def add(self, chunk: DocumentBatch, shares: Sequences[Share]) -> None:
        """Take documents, which are the lanes' in this order: all, or none of them if there is an error.

        Raises:
            CheckpointError: an offset is behind the end of its document.
        """
        new = self._items(chunk, shares)
        ends = np.cumsum([share.num_documents for share in shares])
        for share, end in zip(shares, ends.tolist(), strict=True):
            _check_inside(share.place.offset, int(new[_LENGTHS, end - share.num_documents]))
        num_tokens = np.diff(np.cumsum(new[_LENGTHS])[ends - 1], prepend=0).tolist()
        begin = 0
        for (lane, place, _), end, own_tokens in zip(shares, ends.tolist(), num_tokens, strict=True):
            own = new[:, begin:end]
            if place.offset > 0:
                _use(own, place.offset)
            self._columns[lane] = np.concatenate([self._columns[lane], own], axis=1)
            self._num_tokens[lane] += own_tokens - place.offset
            begin = end
        for number, error in chunk.errors.items():
            self._errors[int(Items(*new).epochs[number]), int(chunk.numbers[number])] = error

    def _items(self, chunk: DocumentBatch, shares: Sequences[Share]) -> Integers:
        counts = np.array([share.num_documents for share in shares])
        begins = np.cumsum(counts) - counts
        first_positions = np.array([share.place.position for share in shares])
        documents = np.arange(len(chunk.numbers))
        return np.stack(
            Items(
                numbers=chunk.numbers,
                epochs=np.repeat([share.place.epoch for share in shares], counts),
                positions=documents + np.repeat(first_positions - begins, counts),
                fates=chunk.fates,
                whole=chunk.lengths + chunk.cut_tokens,
                given=chunk.lengths,
                first=np.zeros_like(documents),
                lengths=chunk.lengths,
                arrays=self._keep(chunk.tokens)[chunk.arrays],
                starts=chunk.starts,
            )
        )

    def _keep(self, arrays: Sequences[NDArray[Any]]) -> Integers:
        """Numbers of arrays; those that no document lies in any more are let go."""
        known = {id(tokens): number for number, tokens in self._arrays.items()}
        if not all(id(tokens) in known for tokens in arrays):
            used = {int(number) for columns in self._columns.values() for number in np.unique(Items(*columns).arrays)}
            self._arrays = {number: tokens for number, tokens in self._arrays.items() if number in used}
        numbers = []
        for tokens in arrays:
            if (number := known.get(id(tokens))) is None:
                number = known[id(tokens)] = self._num_arrays
                self._num_arrays += 1
            self._arrays[number] = tokens
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)

    def cut(self, num_sequences: Mapping[int, int]) -> Cut:
        """Take so many whole sequences of each lane, one lane behind the other.

        What is passed over behind a lane's last token stays.
        """
        taken = [self._take(lane, number * self._shape.length) for lane, number in num_sequences.items() if number]
        items = Items(*np.concatenate(taken, axis=1))
        return Cut(items, sum(num_sequences.values()), self._shape, self._arrays, self._errors)

    def _take(self, lane: int, num_tokens: int) -> Integers:
        columns = self._columns[lane]
        ends = np.cumsum(columns[_LENGTHS])
        last = int(np.searchsorted(ends, num_tokens))
        over = int(ends[last]) - num_tokens
        taken = columns[:, : last + 1].copy()
        taken[_LENGTHS, last] -= over
        self._columns[lane] = columns[:, last if over else last + 1 :]
        if over:
            _use(self._columns[lane], int(taken[_LENGTHS, last]))
        self._num_tokens[lane] -= num_tokens
        return taken

    def rest(self, lane: int) -> Sequence:
        """Take all that is left of a lane, which is less than a sequence, and fill it up."""
        length, num_tokens = self._shape.length, self._num_tokens[lane]
        items = Items(*self._columns[lane])
        self._columns[lane], self._num_tokens[lane] = self._columns[lane][:, :0], 0
        sequence = Cut(items, 1, self._shape, self._arrays, self._errors).sequence(0)
        return sequence._replace(
            parts=[*sequence.parts, filling(length - num_tokens, self._shape)],
            lengths=[*sequence.lengths, length - num_tokens],
            blanks=[*sequence.blanks, (num_tokens, length)],
            num_tokens=num_tokens,
            # As all sequences that are filled up have them: what was passed over first.
            records=sequence.records[np.argsort(sequence.records["num_tokens"] > 0, kind="stable")],
        )


def _check_inside(offset: int, length: int) -> None:
    if offset > 0 and offset >= length:
        raise CheckpointError(
            "the data cursor stands behind the end of a document: the data have changed, or it is damaged",
            where="cursor.places",
            found=f"token {offset} of {length}",
            hint="the data of the checkpoint, or a new run.name",
        )


def _use(columns: Integers, num_tokens: int) -> None:
    """Take tokens away from the beginning of the first item."""
    columns[_FIRST, 0] += num_tokens
    columns[_STARTS, 0] += num_tokens
    columns[_LENGTHS, 0] -= num_tokens
