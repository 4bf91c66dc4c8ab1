"""What packing gives: a sequence, what it was made of, and where the next one begins.

documents   a a a |  b b b b b | c c
input_ids   a a a b | b b b b | c c ...
position    0 1 2 0 | 0 1 2 3 | 0 1          restarts: models of transformers then mask across documents
labels      . a a . | . b b b | . c          . is ignored: nothing before it is of its document and its sequence

A negative token of a document is the complement of one that is context: `~id` becomes id, without a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.cursor import Place
from hfdist.data.documents import Document
from hfdist.data.records import Fate, Piece, Records, make_records

IGNORED = -100
"""Label of a position that is not a target."""

INPUT_IDS, POSITION_IDS, LABELS = range(3)
NAMES = ("input_ids", "position_ids", "labels")


class Placed(NamedTuple):
    """A document and where it stands in its lane."""

    epoch: int
    position: int
    document: Document


class Sequence(NamedTuple):
    """A packed sequence."""

    rows: NDArray[np.int32]
    """input_ids, position_ids and labels; shape [3, length]."""
    next_place: Place
    """Where the next one begins."""
    num_tokens: int
    """Without filling."""
    records: Records
    """Of pieces, and of documents passed over on the way; their sequence and pool are not set yet."""
    problems: tuple[str, ...] = ()
    """Messages of bad rows among them."""


@dataclass(frozen=True)
class Shape:
    """What sequences look like."""

    length: int
    """Tokens in a sequence; of a document by itself: at the most."""
    fill_id: int
    """Token that fills up, and that stands for quarantined ones."""


def passed_over(placed: Placed) -> Piece:
    """Record of a document that gives no tokens."""
    return Piece(placed.document.number, placed.epoch, placed.document.fate)


def problems_of(passed: list[Placed]) -> tuple[str, ...]:
    """Messages of the bad ones."""
    return tuple(str(placed.document.error) for placed in passed if placed.document.error is not None)


def assemble(
    pieces: list[tuple[Placed, int, int]],
    passed: list[Placed],
    shape: Shape,
    next_place: Place,
    *,
    length: int | None = None,
) -> Sequence:
    """Make a sequence of whole pieces, filled up at its end.

    Args:
        pieces: documents, each with its first token and number of tokens.
        passed: documents passed over before it.
        shape: of sequences.
        next_place: behind it.
        length: of this sequence; None: `shape.length`.
    """
    rows = np.empty((3, shape.length if length is None else length), dtype=np.int32)
    filled = 0
    records = [passed_over(placed) for placed in passed]
    for placed, first, num_tokens in pieces:
        document = placed.document
        span = slice(filled, filled + num_tokens)
        put(rows[:, span], document, first, shape)
        whole = len(document.tokens) + document.cut_tokens
        records.append(Piece(document.number, placed.epoch, document.fate, first, num_tokens, whole))
        filled += num_tokens
    rows[INPUT_IDS, filled:] = shape.fill_id
    rows[POSITION_IDS, filled:] = np.arange(rows.shape[1] - filled)
    rows[LABELS, filled:] = IGNORED
    return Sequence(rows, next_place, filled, make_records(records), problems_of(passed))


def put(rows: NDArray[np.int32], document: Document, first: int, shape: Shape) -> None:
    """Write tokens of a document from its token `first` on, as many as there is room for in `rows`."""
    num_tokens = rows.shape[1]
    rows[POSITION_IDS] = np.arange(num_tokens)
    if document.fate is Fate.quarantined:
        rows[INPUT_IDS] = shape.fill_id
        rows[LABELS] = IGNORED
        return
    rows[INPUT_IDS], rows[LABELS] = ids_and_labels(document.tokens[first : first + num_tokens])
    rows[LABELS, :1] = IGNORED


def ids_and_labels(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tell tokens of documents from their targets; both of shape [tokens]."""
    is_context = tokens < 0
    return np.where(is_context, ~tokens, tokens), np.where(is_context, np.int32(IGNORED), tokens)
