"""Sequences of whole pieces, filled up at their ends: all of a window together, which makes numpy's calls cheap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hfdist.data.order.cursor import Place
from hfdist.data.order.records import RECORD, Records, Status
from hfdist.data.packing.best_fit import Integers, Pieces
from hfdist.data.packing.sequence import Sequence, Shape, filling
from hfdist.data.sources.document_batch import DocumentBatch, slices


class Arrangement(NamedTuple):
    """Pieces of a window's documents, sequence by sequence."""

    pieces: Pieces
    ends: Integers
    """Where each sequence ends, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Of sequences, with what fills them up; shape [sequences]."""


def make_sequences(
    documents: DocumentBatch, begin: Place, behind: Place, arrangement: Arrangement, shape: Shape, first: int
) -> Iterator[Sequence]:
    """Give the sequences of a window from number `first` on; what the window passes over is not in their records.

    Args:
        documents: of the window.
        begin: where it begins.
        behind: where the next one begins.
        arrangement: of their pieces.
        shape: of sequences; no longer than its length.
        first: see above.
    """
    pieces, ends, lengths = arrangement
    owners = pieces.document
    records = _records(documents, begin.epoch, pieces)
    room = lengths - np.diff(np.cumsum(pieces.num_tokens)[ends - 1], prepend=0)
    has_room = room > 0
    # What fills a sequence up is one piece more at its end, of one array more behind the others; so is what stands for
    # quarantined documents.
    tokens, filler = [*documents.tokens, filling(shape.length, shape)], len(documents.tokens)
    is_blank = documents.fates[owners] == Status.quarantined
    arrays = np.where(is_blank, filler, documents.arrays[owners])
    starts = np.where(is_blank, 0, documents.starts[owners] + pieces.first_token)
    columns = np.stack([arrays, starts, pieces.num_tokens, is_blank])
    fillers = np.zeros((len(columns), np.count_nonzero(has_room)), dtype=np.int64)
    fillers[0], fillers[2], fillers[3] = filler, room[has_room], True
    arrays, starts, sizes, is_blank = np.insert(columns, ends[has_room], fillers, axis=1)
    parts = slices(tokens, arrays, starts, sizes)
    filled_ends = ends + np.cumsum(has_room)
    blanks = _blanks(sizes, is_blank, filled_ends, lengths)
    counts, num_tokens = sizes.tolist(), (lengths - room).tolist()
    part_ends, record_ends = [0, *filled_ends.tolist()], [0, *ends.tolist()]
    for number in range(first, len(ends)):
        start, stop = part_ends[number : number + 2]
        is_last = number == len(ends) - 1
        yield Sequence(
            parts[start:stop],
            counts[start:stop],
            blanks[number],
            behind if is_last else Place(begin.epoch, begin.position, number + 1),
            num_tokens[number],
            records[record_ends[number] : record_ends[number + 1]],
        )


def _records(documents: DocumentBatch, epoch: int, pieces: Pieces) -> Records:
    records = np.zeros(len(pieces.document), dtype=RECORD)
    records["first_token"], records["num_tokens"], records["epoch"] = pieces.first_token, pieces.num_tokens, epoch
    of_tokens = documents.lengths + documents.cut_tokens
    for name, values in (("document", documents.numbers), ("fate", documents.fates), ("of_tokens", of_tokens)):
        records[name] = values[pieces.document]
    return records


def _blanks(sizes: Integers, is_blank: Integers, ends: Integers, lengths: Integers) -> list[list[tuple[int, int]]]:
    """Give from where to where a sequence has no targets, for each.

    Args:
        sizes: of the parts of a window, in order.
        is_blank: which of them are no targets.
        ends: of sequences, counted in parts.
        lengths: of sequences.
    """
    blanks: list[list[tuple[int, int]]] = [[] for _ in ends]
    places = np.flatnonzero(is_blank)
    sequence = np.searchsorted(ends, places, side="right")
    stops = np.cumsum(sizes)[places] - (np.cumsum(lengths) - lengths)[sequence]
    starts = stops - sizes[places]
    for number, start, stop in zip(sequence.tolist(), starts.tolist(), stops.tolist(), strict=True):
        blanks[number].append((start, stop))
    return blanks
