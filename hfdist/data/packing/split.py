"""Documents cut where sequences begin, many sequences together: which tokens each is made of, and its records.

All in arrays, and no token is touched. Documents of several lanes may stand one behind the other, if those of each are
as many tokens as whole sequences have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.cursor import Place
from hfdist.data.order.records import RECORD, Records, Status
from hfdist.data.packing.sequence import Sequence, Shape, filling
from hfdist.data.sources.document_batch import slices
from hfdist.errors import DataError

Integers = NDArray[np.int64]


class Items(NamedTuple):
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


class Pieces(NamedTuple):
    """Items cut where sequences begin, and those that are passed over. Each of shape [pieces]."""

    owners: Integers
    """The item."""
    starts: Integers
    """In all tokens of the items."""
    first: Integers
    """Token of the item, counted in what is left of it."""
    lengths: Integers
    """0: passed over."""


class Cut:
    """Sequences of whole items, but for the last item of each lane, which is as long as its last sequence needs.

    Args:
        items: of the first sequence, then of the next.
        num_sequences: that they make; the last one may be shorter than the others.
        shape: of sequences.
        arrays: tokens, by number.
        errors: of bad documents, by epoch and number; those that are met are taken out.
    """

    def __init__(
        self,
        items: Items,
        num_sequences: int,
        shape: Shape,
        arrays: Mapping[int, NDArray[Any]],
        errors: dict[tuple[int, int], DataError],
    ) -> None:
        self._length, self._errors = shape.length, errors
        all_pieces = _cut(items, num_sequences, shape.length)
        self._records = _records(items, all_pieces)
        inner = np.arange(1, num_sequences) * shape.length
        self._record_ends = [0, *np.searchsorted(all_pieces.starts, inner).tolist(), len(self._records)]
        is_piece = all_pieces.lengths > 0
        pieces = Pieces(*(column[is_piece] for column in all_pieces))
        self._piece_ends = [0, *np.searchsorted(pieces.starts, inner).tolist(), len(pieces.lengths)]
        self._lengths = pieces.lengths.tolist()
        self._parts = _parts(items, pieces, shape, arrays)
        self._blanks = _blanks(items, pieces, shape.length)
        self._epochs, self._positions, self._offsets = _next_places(items, num_sequences, shape.length)

    def sequence(self, number: int) -> Sequence:
        """Make one of them: thousands that wait would be looked through by each garbage collection."""
        start, stop = self._piece_ends[number : number + 2]
        first, last = self._record_ends[number : number + 2]
        records = self._records[first:last]
        return Sequence(
            self._parts[start:stop],
            self._lengths[start:stop],
            self._blanks.get(number, ()),
            Place(self._epochs[number], self._positions[number], self._offsets[number]),
            self._length,
            records,
            self._problems(records) if self._errors else (),
        )

    def _problems(self, records: Records) -> tuple[str, ...]:
        bad = records[records["fate"] == Status.bad]
        return tuple(str(self._errors.pop((int(record["epoch"]), int(record["document"])))) for record in bad)


def _cut(items: Items, num_sequences: int, length: int) -> Pieces:
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
    return Pieces(owners, starts, starts - begins[owners], stops - starts)


def _records(items: Items, pieces: Pieces) -> Records:
    records = np.zeros(len(pieces.owners), dtype=RECORD)
    records["document"] = items.numbers[pieces.owners]
    records["first_token"] = items.first[pieces.owners] + pieces.first
    records["num_tokens"] = pieces.lengths
    records["of_tokens"] = items.whole[pieces.owners]
    records["epoch"] = items.epochs[pieces.owners]
    records["fate"] = items.fates[pieces.owners]
    return records


def _parts(items: Items, pieces: Pieces, shape: Shape, tokens: Mapping[int, NDArray[Any]]) -> list[NDArray[Any]]:
    """Tokens of each piece, where they lie."""
    owners = pieces.owners
    parts = slices(tokens, items.arrays[owners], items.starts[owners] + pieces.first, pieces.lengths)
    for place in np.flatnonzero(items.fates[owners] == Status.quarantined).tolist():
        parts[place] = filling(len(parts[place]), shape)
    return parts


def _next_places(items: Items, num_sequences: int, length: int) -> tuple[list[int], list[int], list[int]]:
    """Where each sequence ends: columns of `Place`."""
    ends, edges = np.cumsum(items.lengths), np.arange(1, num_sequences + 1) * length
    # The item that holds the last token of each; of one that is too short, the last item, used and more than used.
    lasts = np.minimum(np.searchsorted(ends, edges), len(ends) - 1)
    used = items.first[lasts] + items.lengths[lasts] - (ends[lasts] - edges)
    is_done = used >= items.given[lasts]
    positions, offsets = items.positions[lasts] + is_done, np.where(is_done, 0, used)
    return items.epochs[lasts].tolist(), positions.tolist(), offsets.tolist()


def _blanks(items: Items, pieces: Pieces, length: int) -> dict[int, list[tuple[int, int]]]:
    """Quarantined pieces, by sequence."""
    blanks: dict[int, list[tuple[int, int]]] = {}
    for place in np.flatnonzero(items.fates[pieces.owners] == Status.quarantined).tolist():
        number, start = divmod(int(pieces.starts[place]), length)
        blanks.setdefault(number, []).append((start, start + int(pieces.lengths[place])))
    return blanks
