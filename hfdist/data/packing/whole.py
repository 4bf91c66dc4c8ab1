"""Sequences of whole pieces, filled up at their ends: many made together, so that numpy's calls become cheap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.packing.fit import Integers, Pieces
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, POSITION_IDS, Placed, Shape, ids_and_labels
from hfdist.data.records import RECORD, Fate, Records

# Made together: what a processor keeps near while it goes over them.
_TOKENS_TOGETHER = 1 << 16


class Arrangement(NamedTuple):
    """Pieces of a window's documents, sequence by sequence."""

    pieces: Pieces
    ends: Integers
    """Where each sequence ends, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Of sequences, with what fills them up; shape [sequences]."""


class Made(NamedTuple):
    """A sequence; see `Sequence`."""

    rows: NDArray[np.int32]
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
    records = _records(documents, pieces)
    used = np.diff(np.cumsum(pieces.num_tokens)[ends - 1], prepend=0)
    # What fills a sequence up is one piece more at its end, of one document more behind the others.
    filler = len(documents)
    columns = ((pieces.document, filler), (pieces.first_token, 0), (pieces.num_tokens, lengths - used))
    filled_up = Pieces(*(np.insert(column, ends, value) for column, value in columns))
    tokens = [placed.document.tokens for placed in documents]
    tokens.append(np.full(shape.length, shape.fill_id, dtype=np.int32))
    is_blank = np.zeros(len(tokens), dtype=bool)
    is_blank[filler] = True
    for place, placed in enumerate(documents):
        if placed.document.fate is Fate.quarantined:
            tokens[place] = np.full(len(tokens[place]), shape.fill_id, dtype=np.int32)
            is_blank[place] = True
    counting = np.arange(shape.length, dtype=np.int32)
    num_together = max(_TOKENS_TOGETHER // shape.length, 1)
    cuts = [0, *ends.tolist()]
    for begin in range(first, len(ends), num_together):
        end = min(begin + num_together, len(ends))
        own = Pieces(*(column[cuts[begin] + begin : cuts[end] + end] for column in filled_up))
        block = _block(own, tokens, is_blank, counting)
        stop = 0
        for number, length in zip(range(begin, end), lengths[begin:end].tolist(), strict=True):
            start, stop = stop, stop + length
            yield Made(block[:, start:stop], int(used[number]), records[cuts[number] : cuts[number + 1]])


def _block(
    pieces: Pieces, tokens: list[NDArray[np.int32]], is_blank: NDArray[np.bool_], counting: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Rows of some sequences end to end; shape [3, tokens].

    Args:
        pieces: in order.
        tokens: of all documents of the window.
        is_blank: which of them are no targets.
        counting: 0, 1, ... up to the length of a sequence.
    """
    stops = np.cumsum(pieces.num_tokens)
    block = np.empty((3, int(stops[-1])), dtype=np.int32)
    num_tokens = pieces.num_tokens.tolist()
    parts = []
    for document, first, num in zip(pieces.document.tolist(), pieces.first_token.tolist(), num_tokens, strict=True):
        whole = tokens[document]
        parts.append(whole if len(whole) == num else whole[first : first + num])
    ids = np.concatenate(parts, out=block[INPUT_IDS], casting="unsafe")
    np.concatenate([counting[:num] for num in num_tokens], out=block[POSITION_IDS])
    if ids.min() < 0:
        block[INPUT_IDS], block[LABELS] = ids_and_labels(ids)
    else:
        block[LABELS] = ids
    starts = stops - pieces.num_tokens
    # One of no tokens begins where the next one does, or behind the last.
    block[LABELS, starts[pieces.num_tokens > 0]] = IGNORED
    blank = np.flatnonzero(is_blank[pieces.document])
    for start, stop in zip(starts[blank].tolist(), stops[blank].tolist(), strict=True):
        block[LABELS, start:stop] = IGNORED
    return block


def _records(documents: list[Placed], pieces: Pieces) -> Records:
    records = np.zeros(len(pieces.document), dtype=RECORD)
    own = [placed.document for placed in documents]
    num_documents = len(own)
    numbers = np.fromiter((document.number for document in own), np.int64, num_documents)
    fates = np.fromiter((document.fate for document in own), np.int64, num_documents)
    whole = np.fromiter((len(document.tokens) + document.cut_tokens for document in own), np.int64, num_documents)
    records["document"] = numbers[pieces.document]
    records["fate"] = fates[pieces.document]
    records["of_tokens"] = whole[pieces.document]
    records["first_token"], records["num_tokens"] = pieces.first_token, pieces.num_tokens
    records["epoch"] = documents[0].epoch
    return records
