"""Sequences of whole pieces, filled up at their ends: many made together, so that numpy's calls become cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.packing.fit import Integers, Pieces
from hfdist.data.packing.sequence import IGNORED, POSITION_IDS, Placed, Shape, ids_and_labels
from hfdist.data.records import RECORD, Fate, Records

# Made together: what stays in a core's own cache while it is gone over a few times.
_TOKENS_TOGETHER = 1 << 15
_ATTRIBUTES = attrgetter("number", "fate", "cut_tokens", "tokens")


class Arrangement(NamedTuple):
    """Pieces of a window's documents, sequence by sequence."""

    pieces: Pieces
    ends: Integers
    """Where each sequence ends, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Of sequences, with what fills them up; shape [sequences]."""


Made = tuple[NDArray[np.int32], int, Records]
"""Rows, number of tokens and records of a `Sequence`."""


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
    tokens: list[NDArray[np.int32]] = list(found)
    is_blank = np.zeros(len(tokens) + 1, dtype=bool)
    if Fate.quarantined in fates:
        is_blank[:-1] = np.equal(fates, Fate.quarantined)
        for place in np.flatnonzero(is_blank).tolist():
            tokens[place] = np.full(len(tokens[place]), shape.fill_id, dtype=np.int32)
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
    tokens.append(np.full(shape.length, shape.fill_id, dtype=np.int32))
    is_blank[-1] = True
    make_block = _block_maker(filled_up, tokens, is_blank, shape.length)
    num_together = max(_TOKENS_TOGETHER // shape.length, 1)
    cuts, filled_cuts = [0, *ends.tolist()], [0, *(ends + np.cumsum(has_room)).tolist()]
    widths, num_tokens = lengths.tolist(), (lengths - room).tolist()
    for begin in range(first, len(widths), num_together):
        end = min(begin + num_together, len(widths))
        block = make_block(filled_cuts[begin], filled_cuts[end])
        stop = 0
        for number in range(begin, end):
            start, stop = stop, stop + widths[number]
            yield block[:, start:stop], num_tokens[number], records[cuts[number] : cuts[number + 1]]


def _block_maker(
    pieces: Pieces, tokens: list[NDArray[np.int32]], is_blank: NDArray[np.bool_], length: int
) -> Callable[[int, int], NDArray[np.int32]]:
    """Give what makes the rows of pieces A to B end to end; shape [3, tokens].

    Args:
        pieces: of a window, in order; none of them empty.
        tokens: of all its documents.
        is_blank: which of them are no targets.
        length: of sequences.
    """
    # All that can be done once for the whole window is: a block has only a few dozen pieces.
    owners, firsts, lengths = (column.tolist() for column in pieces)
    parts = [
        whole if len(whole := tokens[document]) == num_tokens else whole[first : first + num_tokens]
        for document, first, num_tokens in zip(owners, firsts, lengths, strict=True)
    ]
    counting = np.arange(length, dtype=np.int32)
    positions = [counting[:num_tokens] for num_tokens in lengths]
    starts = np.cumsum(pieces.num_tokens) - pieces.num_tokens
    blank = np.flatnonzero(is_blank[pieces.document])

    def make(begin: int, end: int) -> NDArray[np.int32]:
        base = starts[begin]
        block = np.empty((3, int(starts[end - 1] - base) + lengths[end - 1]), dtype=np.int32)
        ids, _, labels = block
        np.concatenate(parts[begin:end], out=ids, casting="unsafe")
        np.concatenate(positions[begin:end], out=block[POSITION_IDS])
        if ids.min() < 0:
            ids[:], labels[:] = ids_and_labels(ids)
        else:
            labels[:] = ids
        own = starts[begin:end] - base
        labels[own] = IGNORED
        for piece in blank[slice(*np.searchsorted(blank, [begin, end]).tolist())].tolist():
            start = int(own[piece - begin])
            labels[start : start + lengths[piece]] = IGNORED
        return block

    return make
