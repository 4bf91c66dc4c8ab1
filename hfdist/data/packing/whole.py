"""Sequences of whole pieces, filled up at their ends: all of a window together, which makes numpy's calls cheap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.packing.fit import Integers, Pieces
from hfdist.data.packing.sequence import Placed, Shape, filling
from hfdist.data.records import RECORD, Fate, Records

_ATTRIBUTES = attrgetter("number", "fate", "cut_tokens", "tokens")


class Arrangement(NamedTuple):
    """Pieces of a window's documents, sequence by sequence."""

    pieces: Pieces
    ends: Integers
    """Where each sequence ends, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Of sequences, with what fills them up; shape [sequences]."""


class Made(NamedTuple):
    """What a window knows of a `Sequence`; the fields are those of the same name there."""

    parts: list[NDArray[Any]]
    lengths: list[int]
    blanks: list[tuple[int, int]]
    num_tokens: int
    records: Records


def make_sequences(documents: list[Placed], arrangement: Arrangement, shape: Shape, first: int) -> Iterator[Made]:
    """Give the sequences of a window from number `first` on.

    Args:
        documents: of the window, all of one epoch.
        arrangement: of their pieces.
        shape: of sequences; no longer than its length.
        first: see above.
    """
    pieces, ends, lengths = arrangement
    numbers, fates, cut_tokens, found = zip(*map(_ATTRIBUTES, [placed.document for placed in documents]), strict=True)
    tokens: list[NDArray[Any]] = list(found)
    is_blank = np.zeros(len(tokens) + 1, dtype=bool)
    if Fate.quarantined in fates:
        is_blank[:-1] = np.equal(fates, Fate.quarantined)
        for place in np.flatnonzero(is_blank).tolist():
            tokens[place] = filling(len(tokens[place]), shape)
    records = np.zeros(len(pieces.document), dtype=RECORD)
    records["first_token"], records["num_tokens"] = pieces.first_token, pieces.num_tokens
    records["epoch"] = documents[0].epoch
    of_tokens = [len(one) + num_cut for one, num_cut in zip(tokens, cut_tokens, strict=True)]
    for name, values in (("document", numbers), ("fate", fates), ("of_tokens", of_tokens)):
        records[name] = np.array(values)[pieces.document]
    # What fills a sequence up is one piece more at its end, of one document more behind the others.
    room = lengths - np.diff(np.cumsum(pieces.num_tokens)[ends - 1], prepend=0)
    has_room = room > 0
    columns = ((pieces.document, len(tokens)), (pieces.first_token, 0), (pieces.num_tokens, room[has_room]))
    filled_up = Pieces(*(np.insert(column, ends[has_room], value) for column, value in columns))
    tokens.append(filling(shape.length, shape))
    is_blank[-1] = True
    owners, firsts, sizes = (column.tolist() for column in filled_up)
    parts = [
        whole if len(whole := tokens[document]) == num_tokens else whole[begin : begin + num_tokens]
        for document, begin, num_tokens in zip(owners, firsts, sizes, strict=True)
    ]
    filled_ends = ends + np.cumsum(has_room)
    blanks = _blanks(filled_up, is_blank, filled_ends, lengths)
    num_tokens = (lengths - room).tolist()
    cuts, filled_cuts = pairwise([0, *ends.tolist()]), pairwise([0, *filled_ends.tolist()])
    for number, ((start, stop), (begin, end)) in enumerate(zip(cuts, filled_cuts, strict=True)):
        if number >= first:
            yield Made(parts[begin:end], sizes[begin:end], blanks[number], num_tokens[number], records[start:stop])


def _blanks(
    pieces: Pieces, is_blank: NDArray[np.bool_], ends: Integers, lengths: Integers
) -> list[list[tuple[int, int]]]:
    """Give from where to where a sequence has no targets, for each.

    Args:
        pieces: of a window, in order.
        is_blank: which documents are no targets.
        ends: of sequences, counted in pieces.
        lengths: of sequences.
    """
    blanks: list[list[tuple[int, int]]] = [[] for _ in ends]
    places = np.flatnonzero(is_blank[pieces.document])
    sequence = np.searchsorted(ends, places, side="right")
    stops = np.cumsum(pieces.num_tokens)[places] - (np.cumsum(lengths) - lengths)[sequence]
    starts = stops - pieces.num_tokens[places]
    for number, start, stop in zip(sequence.tolist(), starts.tolist(), stops.tolist(), strict=True):
        blanks[number].append((start, stop))
    return blanks
