"""Documents end to end, cut at the length: no filling, and a document may go on in the next sequence.

Worked out for many sequences together, in arrays: which tokens each is made of, its records and where the next begins.
No token is touched here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.cursor import Place
from hfdist.data.packing.sequence import Sequence, Shape, filling
from hfdist.data.portion import Portion
from hfdist.data.records import RECORD, Fate, Records
from hfdist.errors import CheckpointError, DataError

# Cut together: twice as many each time, so that the first one comes soon and numpy's calls become cheap.
_MOST_SEQUENCES = 128

Integers = NDArray[np.int64]
_Places = tuple[list[int], list[int], list[int]]
"""Columns of `Place`."""


class _Items(NamedTuple):
    """What is left of documents, as columns; nothing of those that are passed over. Each of shape [documents]."""

    numbers: Integers
    epochs: Integers
    positions: Integers
    fates: Integers
    whole: Integers
    """All tokens of the document."""
    given: Integers
    """Those that `data.too_long` leaves."""
    first: Integers
    """Token of the document that is used next."""
    lengths: Integers
    """How many are left."""
    arrays: Integers
    """Number of the array in which they lie."""
    starts: Integers
    """Where the next one lies in it."""


class _Pieces(NamedTuple):
    """Items cut where sequences begin, and those that are passed over. Each of shape [pieces]."""

    owners: Integers
    """The item."""
    starts: Integers
    """In all tokens of the items."""
    first: Integers
    """Token of the item, counted in what is left of it."""
    lengths: Integers
    """0: passed over."""


def concat(portions: Iterator[tuple[Place, Portion]], shape: Shape) -> Iterator[Sequence]:
    """Give sequences; the last one, where the documents end, is filled up.

    Args:
        portions: documents in order, and the place of the first of them; its offset, of the first portion only, is
            the first token that is still to be used.
        shape: of sequences.

    Raises:
        CheckpointError: that offset is behind the end of the document.
    """
    waiting, num_together = _Waiting(shape), 1
    for place, portion in portions:
        waiting.add(place, portion)
        while waiting.num_tokens >= num_together * shape.length:
            yield from waiting.cut(min(waiting.num_tokens // shape.length, _MOST_SEQUENCES))
            num_together = min(2 * num_together, _MOST_SEQUENCES)
    if num_sequences := waiting.num_tokens // shape.length:
        yield from waiting.cut(num_sequences)
    if waiting.num_documents:
        yield waiting.rest()


class _Waiting:
    """Documents, or what is left of them, that are in no sequence yet."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._columns = np.empty((len(_Items._fields), 0), dtype=np.int64)
        """Those of `_Items`."""
        self._arrays: dict[int, NDArray[Any]] = {}
        """Tokens, by number."""
        self._num_arrays = 0
        self._errors: dict[tuple[int, int], DataError] = {}
        """Of bad documents, by epoch and number."""
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return self._columns.shape[1]

    def add(self, place: Place, portion: Portion) -> None:
        """Take documents: see `concat`."""
        places = np.arange(len(portion.numbers))
        columns = _Items(
            numbers=portion.numbers,
            epochs=np.full_like(places, place.epoch),
            positions=place.position + places,
            fates=portion.fates,
            whole=portion.lengths + portion.cut_tokens,
            given=portion.lengths,
            first=np.zeros_like(places),
            lengths=portion.lengths,
            arrays=self._num_arrays + portion.arrays,
            starts=portion.starts,
        )
        new = np.stack(columns)
        if place.offset > 0:
            _check_inside(place.offset, int(portion.lengths[0]))
            _use(new, 0, place.offset)
        self._columns = np.concatenate([self._columns, new], axis=1)
        least = int(_Items(*self._columns).arrays.min())
        self._arrays = {number: tokens for number, tokens in self._arrays.items() if number >= least}
        self._arrays |= dict(enumerate(portion.tokens, self._num_arrays))
        self._num_arrays += len(portion.tokens)
        self._errors |= {(place.epoch, int(portion.numbers[n])): error for n, error in portion.errors.items()}
        self.num_tokens += int(_Items(*new).lengths.sum())

    def cut(self, num_sequences: int) -> Iterator[Sequence]:
        """Take so many whole sequences. What is passed over behind their last token stays."""
        num_tokens = num_sequences * self._shape.length
        ends = np.cumsum(_Items(*self._columns).lengths)
        last = int(np.searchsorted(ends, num_tokens))
        taken = self._columns[:, : last + 1].copy()
        over = int(ends[last]) - num_tokens
        if over:
            _Items(*taken).lengths[last] -= over
            _use(self._columns, last, int(_Items(*taken).lengths[last]))
        self._columns = self._columns[:, last if over else last + 1 :]
        self.num_tokens -= num_tokens
        items = _Items(*taken)
        return self._sequences(items, num_sequences, _next_places(items, num_sequences, self._shape.length))

    def rest(self) -> Sequence:
        """Take all that is left, which is less than a sequence, and fill it up."""
        items, length = _Items(*self._columns), self._shape.length
        self._columns = self._columns[:, :0]
        place = [int(items.epochs[-1])], [int(items.positions[-1]) + 1], [0]
        (sequence,) = self._sequences(items, 1, place)
        num_filled = length - self.num_tokens
        return sequence._replace(
            parts=[*sequence.parts, filling(num_filled, self._shape)],
            lengths=[*sequence.lengths, num_filled],
            blanks=[*sequence.blanks, (self.num_tokens, length)],
            num_tokens=self.num_tokens,
            # As all sequences that are filled up have them: what was passed over first.
            records=sequence.records[np.argsort(sequence.records["num_tokens"] > 0, kind="stable")],
        )

    def _sequences(self, items: _Items, num_sequences: int, places: _Places) -> Iterator[Sequence]:
        """Cut items at the length, and say which tokens each sequence is made of; `places` are behind each."""
        length = self._shape.length
        all_pieces = _cut(items, num_sequences, length)
        records = _records(items, all_pieces)
        inner = np.arange(1, num_sequences) * length
        of_records = [0, *np.searchsorted(all_pieces.starts, inner).tolist(), len(records)]
        is_piece = all_pieces.lengths > 0
        pieces = _Pieces(*(column[is_piece] for column in all_pieces))
        of_pieces = [0, *np.searchsorted(pieces.starts, inner).tolist(), len(pieces.lengths)]
        parts, lengths = self._parts(items, pieces), pieces.lengths.tolist()
        blanks = _blanks(items, pieces, length)
        # Each made when it is asked for: thousands that wait would be looked through by each garbage collection.
        behind, edges, record_edges = (
            zip(*places, strict=True),
            itertools.pairwise(of_pieces),
            itertools.pairwise(of_records),
        )
        for number, (place, (start, stop), (first, last)) in enumerate(zip(behind, edges, record_edges, strict=True)):
            own = records[first:last]
            yield Sequence(
                parts[start:stop],
                lengths[start:stop],
                blanks.get(number, ()),
                Place._make(place),
                length,
                own,
                self._problems(own) if self._errors else (),
            )

    def _parts(self, items: _Items, pieces: _Pieces) -> list[NDArray[Any]]:
        """Tokens of each piece, where they lie."""
        arrays, starts = items.arrays[pieces.owners], items.starts[pieces.owners] + pieces.first
        stops = (starts + pieces.lengths).tolist()
        tokens, spans = self._arrays, zip(arrays.tolist(), starts.tolist(), stops, strict=True)
        parts = [tokens[array][start:stop] for array, start, stop in spans]
        for place in np.flatnonzero(items.fates[pieces.owners] == Fate.quarantined).tolist():
            parts[place] = filling(len(parts[place]), self._shape)
        return parts

    def _problems(self, records: Records) -> tuple[str, ...]:
        bad = records[records["fate"] == Fate.bad]
        return tuple(str(self._errors.pop((int(record["epoch"]), int(record["document"])))) for record in bad)


def _check_inside(offset: int, length: int) -> None:
    if offset >= length:
        raise CheckpointError(
            "the data cursor stands behind the end of a document: the data have changed, or it is damaged",
            where="cursor.places",
            found=f"token {offset} of {length}",
            hint="the data of the checkpoint, or a new run.name",
        )


def _use(columns: Integers, place: int, num_tokens: int) -> None:
    """Take tokens away from the beginning of an item."""
    items = _Items(*columns)
    items.first[place] += num_tokens
    items.starts[place] += num_tokens
    items.lengths[place] -= num_tokens


def _cut(items: _Items, num_sequences: int, length: int) -> _Pieces:
    """Cut items, of which the first begins a sequence, where sequences begin."""
    ends = np.cumsum(items.lengths)
    begins = ends - items.lengths
    edges = np.arange(1, num_sequences) * length
    holders = np.searchsorted(ends, edges, side="right")
    is_inside = begins[holders] != edges
    owners = np.concatenate([np.arange(len(ends)), holders[is_inside]])
    starts = np.concatenate([begins, edges[is_inside]])
    # Stable: what is passed over stays before the piece that begins at the same token.
    order = np.argsort(starts, kind="stable")
    owners, starts = owners[order], starts[order]
    stops = np.minimum(ends[owners], (starts // length + 1) * length)
    return _Pieces(owners, starts, starts - begins[owners], stops - starts)


def _records(items: _Items, pieces: _Pieces) -> Records:
    records = np.zeros(len(pieces.owners), dtype=RECORD)
    records["document"] = items.numbers[pieces.owners]
    records["first_token"] = items.first[pieces.owners] + pieces.first
    records["num_tokens"] = pieces.lengths
    records["of_tokens"] = items.whole[pieces.owners]
    records["epoch"] = items.epochs[pieces.owners]
    records["fate"] = items.fates[pieces.owners]
    return records


def _next_places(items: _Items, num_sequences: int, length: int) -> _Places:
    """Where each sequence ends."""
    ends, edges = np.cumsum(items.lengths), np.arange(1, num_sequences + 1) * length
    # The item that holds the last token of each.
    lasts = np.searchsorted(ends, edges)
    used = items.first[lasts] + items.lengths[lasts] - (ends[lasts] - edges)
    is_done = used == items.given[lasts]
    positions, offsets = items.positions[lasts] + is_done, np.where(is_done, 0, used)
    return items.epochs[lasts].tolist(), positions.tolist(), offsets.tolist()


def _blanks(items: _Items, pieces: _Pieces, length: int) -> dict[int, list[tuple[int, int]]]:
    """Quarantined pieces, by sequence."""
    blanks: dict[int, list[tuple[int, int]]] = {}
    for place in np.flatnonzero(items.fates[pieces.owners] == Fate.quarantined).tolist():
        number, start = divmod(int(pieces.starts[place]), length)
        blanks.setdefault(number, []).append((start, start + int(pieces.lengths[place])))
    return blanks
