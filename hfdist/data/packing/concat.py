"""Packing of documents end to end, cut at the sequence length: no filling, and a document may go on in the next one.

    documents     a a a | b b b b b | c c c c
    sequences     a a a b | b b b b | c c c c        of 4 tokens

Documents of one lane or of many wait in a buffer until they make whole sequences. Many sequences are cut at once, as
columns of numbers: a call of numpy costs as much as hundreds of documents, and no token is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat, tee
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, Status, make_records
from hfdist.data.packing.sequence import (
    Integers,
    PackedSequence,
    Pieces,
    Problem,
    Shape,
    after_the_end,
    filling,
    join_tokens,
)
from hfdist.data.sources.document_batch import DocumentBatch, views_of
from hfdist.errors import DataError

_MOST_SEQUENCES = 128
"""The most sequences that are cut at once; from one on, twice as many each time, so that the first one comes soon."""
_FILLING = -1
"""Number of the array that stands for the tokens of quarantined documents."""


def concat(chunks: Iterator[tuple[Place, DocumentBatch]], shape: Shape) -> Iterator[PackedSequence]:
    """Give the sequences of one lane; the last one, where the documents end, is filled up.

    Args:
        chunks: documents in order, each chunk with the place of its first document; the offset of the first place is
            the first token that is still to be used.
        shape: the shape of a sequence.

    Raises:
        CheckpointError: that offset is after the end of its document.
    """
    buffer, num_at_once, lane = PackingBuffer(shape, [0]), 1, 0

    def cut() -> Iterator[PackedSequence]:
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
    """The neighbouring documents of a chunk that are of one lane."""

    lane: int
    """Number of the lane."""
    place: Place
    """Place of the first of these documents; its offset is the first token that is still to be used."""
    num_documents: int


class _Items(NamedTuple):
    """Documents, or what is left of them, as columns of shape [documents]; one that is passed over has no tokens."""

    numbers: Integers
    """Canonical number of the document."""
    epochs: Integers
    positions: Integers
    """Position of the document in its lane's order of the epoch."""
    fates: Integers
    """`Status` of the document."""
    of_tokens: Integers
    """Number of all tokens of the document."""
    given: Integers
    """Number of its tokens that `data.too_long` leaves."""
    first: Integers
    """Place in the document of the first token that is not used yet."""
    lengths: Integers
    """Number of tokens that are not used yet."""
    arrays: Integers
    """Number of the array that holds these tokens."""
    starts: Integers
    """Index of the first of these tokens in that array."""


_FIRST, _LENGTHS, _ARRAYS, _STARTS = map(_Items._fields.index, ("first", "lengths", "arrays", "starts"))


class PackingBuffer:
    """A buffer of the documents of some lanes, or what is left of them, that are in no sequence yet."""

    def __init__(self, shape: Shape, lanes: Iterable[int]) -> None:
        self._shape = shape
        self._columns = {lane: np.empty((len(_Items._fields), 0), dtype=np.int64) for lane in lanes}
        """The documents of each lane: the columns of `_Items`, stacked."""
        self._num_tokens = dict.fromkeys(self._columns, 0)
        self._arrays: dict[int, NDArray[np.integer]] = {}
        """Arrays of tokens, by number."""
        self._num_arrays = 0
        """The number of the next array that comes."""
        self._errors: dict[tuple[int, int], DataError] = {}
        """Errors of bad documents, by epoch and canonical number."""

    def num_documents(self, lane: int) -> int:
        """Count a lane's documents, those that are passed over included."""
        return self._columns[lane].shape[1]

    def num_sequences(self, lane: int) -> int:
        """Count the whole sequences that a lane's documents make."""
        return self._num_tokens[lane] // self._shape.length

    def add(self, chunk: DocumentBatch, lanes: Sequence[LaneDocuments]) -> None:
        """Take all documents of a chunk, which are of these lanes in this order; none of them if there is an error.

        CheckpointError: the offset of a lane's place is after the end of its document.
        """
        new = self._items(chunk, lanes)
        ends = np.cumsum([of_lane.num_documents for of_lane in lanes])
        for of_lane, end in zip(lanes, ends.tolist(), strict=True):
            offset, length = of_lane.place.offset, int(new[_LENGTHS, end - of_lane.num_documents])
            if offset > 0 and offset >= length:
                raise after_the_end("document", f"token {offset} of {length}")
        tokens_of_lanes = np.diff(np.cumsum(new[_LENGTHS])[ends - 1], prepend=0).tolist()
        begin = 0
        for (lane, place, _), end, num_tokens in zip(lanes, ends.tolist(), tokens_of_lanes, strict=True):
            columns = new[:, begin:end]
            if place.offset > 0:
                _use(columns, place.offset)
            self._columns[lane] = np.concatenate([self._columns[lane], columns], axis=1)
            self._num_tokens[lane] += num_tokens - place.offset
            begin = end
        for number, error in chunk.errors.items():
            self._errors[int(_Items(*new).epochs[number]), int(chunk.numbers[number])] = error

    def _items(self, chunk: DocumentBatch, lanes: Sequence[LaneDocuments]) -> Integers:
        """Give the columns of `_Items` for a chunk, stacked; its arrays of tokens are kept."""
        counts = np.array([of_lane.num_documents for of_lane in lanes])
        first_positions = np.array([of_lane.place.position for of_lane in lanes])
        documents = np.arange(len(chunk.numbers))
        return np.stack(
            _Items(
                numbers=chunk.numbers,
                epochs=np.repeat([of_lane.place.epoch for of_lane in lanes], counts),
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

    def _keep(self, arrays: Sequence[NDArray[np.integer]]) -> Integers:
        """Keep arrays of tokens, drop those that hold no document any more, and give the numbers of the new ones."""
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
        """Take whole sequences out of the buffer, one lane after the other.

        Documents that are passed over after a lane's last token stay.

        Args:
            num_sequences: the number of sequences of each lane, by the lane's number.
            turns: the turn of each sequence, in which its pieces are asked for; None: one after the other.
        """
        taken = [self._take(lane, number * self._shape.length) for lane, number in num_sequences.items() if number]
        items = _Items(*np.concatenate(taken, axis=1))
        return CutSequences(items, sum(num_sequences.values()), self._shape, self._arrays, self._errors, turns)

    def _take(self, lane: int, num_tokens: int) -> Integers:
        """Take the items of a lane with its next tokens, as stacked columns; the last item may be cut in two."""
        columns = self._columns[lane]
        ends = np.cumsum(columns[_LENGTHS])
        last = int(np.searchsorted(ends, num_tokens))
        num_left = int(ends[last]) - num_tokens
        taken = columns[:, : last + 1].copy()
        taken[_LENGTHS, last] -= num_left
        if num_left:
            self._columns[lane] = columns[:, last:]
            _use(self._columns[lane], int(taken[_LENGTHS, last]))
        else:
            self._columns[lane] = columns[:, last + 1 :]
        self._num_tokens[lane] -= num_tokens
        return taken

    def rest(self, lane: int) -> PackedSequence:
        """Take all that is left of a lane, less than a sequence, and give it as a sequence that is filled up."""
        length, num_tokens = self._shape.length, self._num_tokens[lane]
        items = _Items(*self._columns[lane])
        self._columns[lane], self._num_tokens[lane] = self._columns[lane][:, :0], 0
        (sequence,) = CutSequences(items, 1, self._shape, self._arrays, self._errors).sequences(0, 1)
        return sequence._replace(
            parts=[*sequence.parts, filling(length - num_tokens, self._shape)],
            lengths=[*sequence.lengths, length - num_tokens],
            blanks=[*sequence.blanks, (num_tokens, length)],
            num_tokens=num_tokens,
            # Documents that were passed over come first, as in all sequences that are filled up.
            records=sequence.records[np.argsort(sequence.records["num_tokens"] > 0, kind="stable")],
        )


def _use(columns: Integers, num_tokens: int) -> None:
    """Take tokens away from the beginning of the first item."""
    columns[_FIRST, 0] += num_tokens
    columns[_STARTS, 0] += num_tokens
    columns[_LENGTHS, 0] -= num_tokens


class Given(NamedTuple):
    """The records and sums of neighbouring sequences of one lane, which the cursor and the ledger take."""

    records: Records
    """Records of all these sequences; their fields `sequence` and `pool` are not set yet."""
    stops: Integers
    """End of each sequence in the records; shape [sequences]."""
    next_place: Place
    """Place where the sequence after the last one begins."""
    num_tokens: int
    """Number of tokens of all these sequences."""
    num_documents: int
    """Number of documents that begin in them, or are passed over."""


class CutSequences:
    """Sequences that are cut out of items, kept as columns.

        items        a a a | b b b b b | c c c c      tokens of each document, end to end; an edge each 4 tokens
        pieces       a a a | b | b b b b | c c c c    an item with an edge inside becomes two pieces, or more

    Args:
        items: what is cut. The items of several lanes may follow each other, if the items of each lane have as many
            tokens as whole sequences.
        num_sequences: the number of sequences; the last one may be shorter than the others.
        shape: the shape of a sequence.
        arrays: the arrays of tokens, by number.
        errors: the errors of bad documents, by epoch and canonical number; those that are met are taken out.
        turns: the turn of each sequence, in which its pieces are asked for; None: one after the other.
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
        # For each piece: the item that owns it, and where it starts among all tokens. Items with an edge inside have
        # several pieces.
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
        """Place of each piece's first token, counted from the first turn."""
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
        """For each piece: the number of its array, its first index in it, and the index after its last one."""
        self._places = _next_places(items, ends, num_sequences, shape.length)

    def pieces(self, first: int, stop: int) -> Pieces:
        """Give the pieces of the sequences of turns `first` to `stop` - 1, end to end."""
        chosen = slice(self._piece_ends[first], self._piece_ends[stop])
        blanks = []
        if self._blanks:
            for turn in range(first, stop):
                before = (turn - first) * self._length
                blanks += [(before + start, before + end) for start, end in self._blanks.get(turn, ())]
        return Pieces(self._join(chosen), self._sizes[chosen], self._begins[chosen] - first * self._length, blanks)

    @cached_property
    def _buffers(self) -> tuple[dict[int, memoryview], np.dtype[np.integer] | None]:
        """The arrays as buffers, whose slices take half the time of arrays'; and the type of all, None if several."""
        types = {tokens.dtype for tokens in self._arrays.values()}
        buffers = {number: tokens.data for number, tokens in self._arrays.items()}
        return buffers, types.pop() if len(types) == 1 else None

    def _join(self, pieces: slice) -> NDArray[np.integer]:
        """Copy the tokens of neighbouring pieces, end to end."""
        buffers, dtype = self._buffers
        if dtype is None:
            return join_tokens(self._parts(pieces))
        spans = zip(*(column[pieces] for column in self._spans), strict=True)
        return np.frombuffer(bytearray().join([buffers[array][start:stop] for array, start, stop in spans]), dtype)

    def _parts(self, pieces: slice) -> list[NDArray[np.integer]]:
        """Give views of the tokens of neighbouring pieces, made now: views of all would not stay in the CPU's cache."""
        return views_of(self._arrays, *(column[pieces] for column in self._spans))

    def given(self, first: int, stop: int) -> Given:
        """Give the records and sums of sequences `first` to `stop` - 1 in the order of lanes, all of one lane."""
        begin, stops = self._record_ends[first], self._record_ends[first + 1 : stop + 1]
        return Given(
            records=self._records[begin : stops[-1]],
            stops=stops - begin,
            next_place=Place(*(int(column[stop - 1]) for column in self._places)),
            num_tokens=(stop - first) * self._length,
            num_documents=int(self._num_begun[first:stop].sum()),
        )

    def sequences(self, first: int, stop: int) -> Iterator[PackedSequence]:
        """Give sequences `first` to `stop` - 1, each made when it is asked for.

        Thousands of objects that wait would be looked through by each garbage collection.
        """
        # An iterator for each field of `PackedSequence`, and all loops in C: a call of Python for each field of each
        # sequence would be most of what packing costs.
        piece_ends = self._piece_ends[first : stop + 1]
        pieces = [*map(slice, piece_ends, piece_ends[1:])]
        record_ends = self._record_ends[first : stop + 1].tolist()
        records, records_again = tee(map(self._records.__getitem__, map(slice, record_ends, record_ends[1:])))
        parts = map(self._parts, pieces)
        lengths = map(self._sizes.__getitem__, pieces)
        blanks = map(self._blanks.get, range(first, stop), repeat(()))
        next_places = map(Place, *(column[first:stop].tolist() for column in self._places))
        num_tokens = repeat(self._length)
        num_documents = self._num_begun[first:stop].tolist()
        problems = map(self._problems, records_again) if self._errors else repeat(())
        return map(PackedSequence, parts, lengths, blanks, next_places, num_tokens, num_documents, records, problems)

    def _problems(self, records: Records) -> tuple[Problem, ...]:
        """Take out the errors of the bad documents in some records."""
        bad = records[records["fate"] == Status.bad]
        keys = zip(bad["epoch"].tolist(), bad["document"].tolist(), strict=True)
        return tuple(Problem(document, str(self._errors.pop((epoch, document)))) for epoch, document in keys)


def _next_places(items: _Items, ends: Integers, num_sequences: int, length: int) -> tuple[Integers, ...]:
    """Give the place after each sequence, as the three columns of `Place`; each of shape [sequences].

    `ends` are the ends of the items, counted in tokens of all items; shape [items].
    """
    edges = np.arange(1, num_sequences + 1) * length
    # The item with the last token of each sequence. A last sequence that is too short ends after the last item, which
    # then counts as used to its end.
    lasts = np.minimum(np.searchsorted(ends, edges), len(ends) - 1)
    used = items.first[lasts] + items.lengths[lasts] - (ends[lasts] - edges)
    is_done = used >= items.given[lasts]
    positions, offsets = items.positions[lasts] + is_done, np.where(is_done, 0, used)
    return items.epochs[lasts], positions, offsets
