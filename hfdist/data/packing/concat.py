"""Documents end to end, cut at the length: no filling, and a document may continue in the next sequence.

Documents of one lane or of many wait in a buffer until they make whole sequences. Many sequences are cut at once: all
in columns, since a call of numpy costs as much as hundreds of documents, and no token is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from functools import cached_property
from itertools import repeat, tee
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, Status, make_records
from hfdist.data.packing.sequence import (
    Integers,
    Pieces,
    Problem,
    Sequence,
    Shape,
    after_the_end,
    filling,
    join_tokens,
)
from hfdist.data.sources.document_batch import DocumentBatch, views_of
from hfdist.errors import DataError

# Cut at once: twice as many each time, so that the first one comes soon and numpy's calls become cheap.
_MOST_SEQUENCES = 128
_FILLING = -1
"""Number of the array that stands for the tokens of quarantined documents."""


def concat(chunks: Iterator[tuple[Place, DocumentBatch]], shape: Shape) -> Iterator[Sequence]:
    """Give the sequences of one lane; the last one, where the documents end, is filled up.

    `chunks` are documents in order, and the place of the first of them; the offset of the first place is the first
    token that is still to be used. CheckpointError: it is after the end of its document.
    """
    buffer, num_at_once, lane = PackingBuffer(shape, [0]), 1, 0

    def cut() -> Iterator[Sequence]:
        num_sequences = min(buffer.num_sequences(lane), _MOST_SEQUENCES)
        return buffer.cut({lane: num_sequences}).sequences(0, num_sequences)

    for place, chunk in chunks:
        buffer.add(chunk, [LaneDocuments(lane, place, len(chunk.numbers))])
        while buffer.num_sequences(lane) >= num_at_once:
            yield from cut()
            num_at_once = min(2 * num_at_once, _MOST_SEQUENCES)
    if buffer.num_sequences(lane):
        yield from cut()
    if buffer.num_documents(lane):
        yield buffer.rest(lane)


class LaneDocuments(NamedTuple):
    """Says which documents of a chunk are a lane's."""

    lane: int
    place: Place
    """Place of the first of these documents; its offset is the first token that is still to be used."""
    num_documents: int


class _Items(NamedTuple):
    """Columns of the documents that are packed, without those that are passed over; each of shape [documents]."""

    numbers: Integers
    epochs: Integers
    positions: Integers
    fates: Integers
    of_tokens: Integers
    """All tokens of the document."""
    given: Integers
    """Tokens of the document that `data.too_long` leaves."""
    first: Integers
    """First token of the document that is not used yet."""
    lengths: Integers
    """Number of tokens that are left."""
    arrays: Integers
    """Number of the array that holds these tokens."""
    starts: Integers
    """Index of the next one in it."""


_FIRST, _LENGTHS, _ARRAYS, _STARTS = map(_Items._fields.index, ("first", "lengths", "arrays", "starts"))


class PackingBuffer:
    """Documents of some lanes, or what is left of them, that are in no sequence yet."""

    def __init__(self, shape: Shape, lanes: Iterable[int]) -> None:
        self._shape = shape
        self._columns = {lane: np.empty((len(_Items._fields), 0), dtype=np.int64) for lane in lanes}
        """Columns of `_Items`."""
        self._num_tokens = dict.fromkeys(self._columns, 0)
        self._arrays: dict[int, NDArray[np.integer]] = {}
        """Arrays of tokens, by number."""
        self._num_arrays = 0
        self._errors: dict[tuple[int, int], DataError] = {}
        """Errors of bad documents, by epoch and number."""

    def num_documents(self, lane: int) -> int:
        """Number of a lane's documents, those passed over included."""
        return self._columns[lane].shape[1]

    def num_sequences(self, lane: int) -> int:
        """Number of whole sequences that a lane's documents make."""
        return self._num_tokens[lane] // self._shape.length

    def add(self, chunk: DocumentBatch, lanes: Sequences[LaneDocuments]) -> None:
        """Take documents, which are the lanes' in this order: all, or none of them if there is an error.

        CheckpointError: an offset is after the end of its document.
        """
        new = self._items(chunk, lanes)
        ends = np.cumsum([own.num_documents for own in lanes])
        for own, end in zip(lanes, ends.tolist(), strict=True):
            offset, length = own.place.offset, int(new[_LENGTHS, end - own.num_documents])
            if offset > 0 and offset >= length:
                raise after_the_end("document", f"token {offset} of {length}")
        num_tokens = np.diff(np.cumsum(new[_LENGTHS])[ends - 1], prepend=0).tolist()
        begin = 0
        for (lane, place, _), end, own_tokens in zip(lanes, ends.tolist(), num_tokens, strict=True):
            columns = new[:, begin:end]
            if place.offset > 0:
                _use(columns, place.offset)
            self._columns[lane] = np.concatenate([self._columns[lane], columns], axis=1)
            self._num_tokens[lane] += own_tokens - place.offset
            begin = end
        for number, error in chunk.errors.items():
            self._errors[int(_Items(*new).epochs[number]), int(chunk.numbers[number])] = error

    def _items(self, chunk: DocumentBatch, lanes: Sequences[LaneDocuments]) -> Integers:
        counts = np.array([own.num_documents for own in lanes])
        first_positions = np.array([own.place.position for own in lanes])
        documents = np.arange(len(chunk.numbers))
        return np.stack(
            _Items(
                numbers=chunk.numbers,
                epochs=np.repeat([own.place.epoch for own in lanes], counts),
                positions=documents + np.repeat(first_positions - (np.cumsum(counts) - counts), counts),
                fates=chunk.fates,
                of_tokens=chunk.lengths + chunk.cut_tokens,
                given=chunk.lengths,
                first=np.zeros_like(documents),
                lengths=chunk.lengths,
                arrays=self._keep(chunk.tokens)[chunk.arrays],
                starts=chunk.starts,
            )
        )

    def _keep(self, arrays: Sequences[NDArray[np.integer]]) -> Integers:
        """Keep arrays, and drop those that hold no document any more; returns their numbers."""
        known = {id(tokens): number for number, tokens in self._arrays.items()}
        if not all(id(tokens) in known for tokens in arrays):
            used = np.unique(np.concatenate([columns[_ARRAYS] for columns in self._columns.values()]))
            self._arrays = {number: tokens for number, tokens in self._arrays.items() if number in used}
        numbers = []
        for tokens in arrays:
            if (number := known.get(id(tokens))) is None:
                number = known[id(tokens)] = self._num_arrays
                self._num_arrays += 1
            self._arrays[number] = tokens
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)

    def cut(self, num_sequences: Mapping[int, int], turns: Integers | None = None) -> CutSequences:
        """Take so many whole sequences of each lane, one lane after the other; `turns` is as in `CutSequences`.

        What is passed over after a lane's last token stays.
        """
        taken = [self._take(lane, number * self._shape.length) for lane, number in num_sequences.items() if number]
        items = _Items(*np.concatenate(taken, axis=1))
        return CutSequences(items, sum(num_sequences.values()), self._shape, self._arrays, self._errors, turns)

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
        items = _Items(*self._columns[lane])
        self._columns[lane], self._num_tokens[lane] = self._columns[lane][:, :0], 0
        (sequence,) = CutSequences(items, 1, self._shape, self._arrays, self._errors).sequences(0, 1)
        return sequence._replace(
            parts=[*sequence.parts, filling(length - num_tokens, self._shape)],
            lengths=[*sequence.lengths, length - num_tokens],
            blanks=[*sequence.blanks, (num_tokens, length)],
            num_tokens=num_tokens,
            # What was passed over comes first, as in all sequences that are filled up.
            records=sequence.records[np.argsort(sequence.records["num_tokens"] > 0, kind="stable")],
        )


def _use(columns: Integers, num_tokens: int) -> None:
    """Take tokens away from the beginning of the first item."""
    columns[_FIRST, 0] += num_tokens
    columns[_STARTS, 0] += num_tokens
    columns[_LENGTHS, 0] -= num_tokens


class Given(NamedTuple):
    """Some sequences of one lane, one after the other: what the cursor and the ledger take of them."""

    records: Records
    """Records of all of them, as in `Sequence`."""
    stops: Integers
    """Where each sequence ends in the records."""
    next_place: Place
    num_tokens: int
    num_documents: int


class CutSequences:
    """Sequences of whole items, but for the last item of each lane, which is as long as its last sequence needs.

    Items of several lanes may follow each other, if those of each lane have as many tokens as whole sequences. The last
    sequence may be shorter than the others. `errors` are of bad documents, by epoch and number; those met are taken
    out. `turns` says for each sequence when its pieces are asked for, if that is not one after the other.
    """

    def __init__(
        self,
        items: _Items,
        num_sequences: int,
        shape: Shape,
        arrays: Mapping[int, NDArray[np.integer]],
        errors: dict[tuple[int, int], DataError],
        turns: Integers | None = None,
    ) -> None:
        self._length, self._errors = shape.length, errors
        ends = np.cumsum(items.lengths)
        begins = ends - items.lengths
        edges = np.arange(1, num_sequences) * shape.length
        # Items with an edge inside become several pieces: the items that own them, and where they start in all tokens.
        holders = np.searchsorted(ends, edges, side="right")
        is_inside = begins[holders] != edges
        owners = np.concatenate([np.arange(len(ends)), holders[is_inside]])
        starts = np.concatenate([begins, edges[is_inside]])
        # Stable: what is passed over stays before the piece that begins at the same token.
        order = np.argsort(starts, kind="stable")
        owners, starts = owners[order], starts[order]
        sizes = np.minimum(ends[owners], (starts // shape.length + 1) * shape.length) - starts
        used = starts - begins[owners]
        first_tokens = items.first[owners] + used
        self._records = make_records(
            len(owners),
            document=items.numbers[owners],
            first_token=first_tokens,
            num_tokens=sizes,
            of_tokens=items.of_tokens[owners],
            epoch=items.epochs[owners],
            fate=items.fates[owners],
        )
        self._record_ends = np.concatenate([[0], np.searchsorted(starts, edges), [len(owners)]])
        self._num_begun = np.diff(np.concatenate([[0], np.cumsum(first_tokens == 0)])[self._record_ends])
        has_tokens = sizes > 0
        owners, starts, sizes, used = (column[has_tokens] for column in (owners, starts, sizes, used))
        numbers = starts // shape.length
        if turns is not None:
            numbers = turns[numbers]
            order = np.argsort(numbers, kind="stable")
            owners, starts, sizes, used, numbers = (column[order] for column in (owners, starts, sizes, used, numbers))
        self._begins = numbers * shape.length + starts % shape.length
        """Where each piece begins, counted from the first turn."""
        self._piece_ends = [0, *np.searchsorted(numbers, np.arange(1, num_sequences)).tolist(), len(owners)]
        self._sizes = sizes.tolist()
        in_arrays, firsts = items.arrays[owners], items.starts[owners] + used
        self._arrays = arrays
        self._blanks: dict[int, list[tuple[int, int]]] = {}
        blanks = np.flatnonzero(items.fates[owners] == Status.quarantined)
        if len(blanks):
            self._arrays = {**arrays, _FILLING: filling(shape.length, shape)}
            in_arrays[blanks], firsts[blanks] = _FILLING, 0
        for piece in blanks.tolist():
            start = int(starts[piece]) % shape.length
            self._blanks.setdefault(int(numbers[piece]), []).append((start, start + self._sizes[piece]))
        self._spans = in_arrays.tolist(), firsts.tolist(), (firsts + sizes).tolist()
        """The array of each piece, and where it begins and ends in it."""
        self._places = _next_places(items, ends, num_sequences, shape.length)

    def pieces(self, first: int, stop: int) -> Pieces:
        """Give what the rows of neighbours are made of, in the order of their turns."""
        own = slice(self._piece_ends[first], self._piece_ends[stop])
        blanks = [
            (start + self._length * number, end + self._length * number)
            for number in (range(stop - first) if self._blanks else ())
            for start, end in self._blanks.get(first + number, ())
        ]
        return Pieces(self._join(own), self._sizes[own], self._begins[own] - first * self._length, blanks)

    @cached_property
    def _buffers(self) -> tuple[dict[int, memoryview], np.dtype[np.integer] | None]:
        """The arrays as buffers, of which a part takes half the time; and their type, if they have the same one."""
        types = {tokens.dtype for tokens in self._arrays.values()}
        parts = {number: tokens.data for number, tokens in self._arrays.items()}
        return parts, types.pop() if len(types) == 1 else None

    def _join(self, pieces: slice) -> NDArray[np.integer]:
        """Copy the tokens of neighbours, end to end."""
        buffers, dtype = self._buffers
        if dtype is None:
            return join_tokens(self._parts(pieces))
        spans = zip(*(column[pieces] for column in self._spans), strict=True)
        return np.frombuffer(bytearray().join([buffers[array][start:stop] for array, start, stop in spans]), dtype)

    def _parts(self, pieces: slice) -> list[NDArray[np.integer]]:
        """Views of the tokens of neighbours, made when they are asked for: those of all at once leave the cache."""
        return views_of(self._arrays, *(column[pieces] for column in self._spans))

    def given(self, first: int, stop: int) -> Given:
        """Give what is known of neighbours in the order of lanes, all of one lane."""
        begin, stops = self._record_ends[first], self._record_ends[first + 1 : stop + 1]
        return Given(
            self._records[begin : stops[-1]],
            stops - begin,
            Place(*(int(column[stop - 1]) for column in self._places)),
            (stop - first) * self._length,
            int(self._num_begun[first:stop].sum()),
        )

    def sequences(self, first: int, stop: int) -> Iterator[Sequence]:
        """Give some of them, each made when it is asked for: thousands that wait would be looked through by each
        garbage collection.
        """
        # All in C: a call of Python for each column of each sequence would be most of what packing costs.
        pieces = self._piece_ends[first:stop], self._piece_ends[first + 1 : stop + 1]
        record_ends = self._record_ends[first : stop + 1].tolist()
        records = map(slice, record_ends, record_ends[1:])
        own, again = tee(map(self._records.__getitem__, records))
        return map(
            Sequence,
            map(self._parts, map(slice, *pieces)),
            map(self._sizes.__getitem__, map(slice, *pieces)),
            map(self._blanks.get, range(first, stop), repeat(())),
            map(Place, *(column[first:stop].tolist() for column in self._places)),
            repeat(self._length),
            self._num_begun[first:stop].tolist(),
            own,
            map(self._problems, again) if self._errors else repeat(()),
        )

    def _problems(self, records: Records) -> tuple[Problem, ...]:
        bad = records[records["fate"] == Status.bad]
        keys = zip(bad["epoch"].tolist(), bad["document"].tolist(), strict=True)
        return tuple(Problem(document, str(self._errors.pop((epoch, document)))) for epoch, document in keys)


def _next_places(items: _Items, ends: Integers, num_sequences: int, length: int) -> tuple[Integers, ...]:
    """Where each sequence ends: columns of `Place`."""
    edges = np.arange(1, num_sequences + 1) * length
    # The item that holds the last token of each; of one that is too short, the last item, used and more than used.
    lasts = np.minimum(np.searchsorted(ends, edges), len(ends) - 1)
    used = items.first[lasts] + items.lengths[lasts] - (ends[lasts] - edges)
    is_done = used >= items.given[lasts]
    positions, offsets = items.positions[lasts] + is_done, np.where(is_done, 0, used)
    return items.epochs[lasts], positions, offsets
