"""What packing gives: a sequence, what it was made of, and where the next one begins.

documents   a a a |  b b b b b | c c
input_ids   a a a b | b b b b | c c ...
position    0 1 2 0 | 0 1 2 3 | 0 1          restarts: models of transformers then mask across documents
labels      . a a . | . b b b | . c          . is ignored: nothing before it is of its document and its sequence

A negative token of a document is the complement of one that is context: `~id` becomes id, without a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.cursor import Place
from hfdist.data.portion import Document
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
    """A packed sequence: which tokens it is made of. They are copied when it becomes part of a batch."""

    parts: Sequences[NDArray[Any]]
    """Tokens end to end; uint16, or int32 with complements. Pieces need not be parts."""
    lengths: Sequences[int]
    """Of its pieces, and of what fills it up: positions restart at each."""
    blanks: Sequences[tuple[int, int]]
    """From where to where nothing is a target: quarantined documents, and what fills up."""
    next_place: Place
    """Where the next one begins."""
    num_tokens: int
    """Without filling."""
    records: Records
    """Of pieces, and of documents passed over on the way; their sequence and pool are not set yet."""
    problems: tuple[str, ...] = ()
    """Messages of bad rows among them."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """input_ids, position_ids and labels; shape [3, length]."""
        rows = np.empty((3, sum(self.lengths)), dtype=np.int32)
        write_rows([self], rows)
        return rows


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
    parts, blanks, filled = [], [], 0
    records = [passed_over(placed) for placed in passed]
    for placed, first, num_tokens in pieces:
        document = placed.document
        if document.fate is Fate.quarantined:
            blanks.append((filled, filled + num_tokens))
            parts.append(filling(num_tokens, shape))
        else:
            parts.append(document.tokens[first : first + num_tokens])
        whole = len(document.tokens) + document.cut_tokens
        records.append(Piece(document.number, placed.epoch, document.fate, first, num_tokens, whole))
        filled += num_tokens
    lengths = [num_tokens for _, _, num_tokens in pieces]
    length = shape.length if length is None else length
    if filled < length:
        parts.append(filling(length - filled, shape))
        lengths.append(length - filled)
        blanks.append((filled, length))
    return Sequence(parts, lengths, blanks, next_place, filled, make_records(records), problems_of(passed))


def filling(num_tokens: int, shape: Shape) -> NDArray[np.int32]:
    """Tokens that stand for others, or for none."""
    return np.full(num_tokens, shape.fill_id, dtype=np.int32)


def write_rows(sequences: Sequences[Sequence], rows: NDArray[Any]) -> None:
    """Copy the tokens of sequences, and make their positions and labels.

    Args:
        sequences: some tokens or more.
        rows: filled with input_ids, position_ids and labels of all, end to end; shape [3, tokens], int32 or int64.
    """
    lengths = list(chain.from_iterable([one.lengths for one in sequences]))
    ids, positions, labels = rows
    # Together, as they lie in the files: faster than to widen each by itself.
    tokens = _tokens(sequences)
    ids[:] = tokens
    if tokens.dtype.kind == "i" and tokens.min() < 0:
        ids[:], labels[:] = ids_and_labels(tokens)
    else:
        labels[:] = ids
    places = np.arange(max(lengths), dtype=rows.dtype)
    np.concatenate([places[:length] for length in lengths], out=positions)
    labels[0] = labels[list(accumulate(lengths))[:-1]] = IGNORED
    first = 0
    for one in sequences if any(one.blanks for one in sequences) else ():
        for start, stop in one.blanks:
            labels[first + start : first + stop] = IGNORED
        first += sum(one.lengths)


def _tokens(sequences: Sequences[Sequence]) -> NDArray[Any]:
    """Of all, end to end: a copy."""
    return np.concatenate(list(chain.from_iterable([one.parts for one in sequences])))


class Bundle(NamedTuple):
    """Sequences on their way to another process: of arrays, each of which costs there and here, as few as can be."""

    tokens: NDArray[Any]
    """Of all, end to end."""
    records: Records
    """As well."""
    num_records: list[int]
    others: list[tuple[Any, ...]]
    """What else each has."""


def bundle(sequences: Sequences[Sequence]) -> Bundle:
    """Copy the tokens and the records of sequences, one or more."""
    return Bundle(
        _tokens(sequences),
        np.concatenate([one.records for one in sequences]),
        [len(one.records) for one in sequences],
        [(one.lengths, one.blanks, tuple(one.next_place), one.num_tokens, one.problems) for one in sequences],
    )


def unbundle(given: Bundle) -> Iterator[Sequence]:
    """Give them back."""
    token, record = 0, 0
    for num_records, (lengths, blanks, place, num_tokens, problems) in zip(
        given.num_records, given.others, strict=True
    ):
        stop, last = token + sum(lengths), record + num_records
        parts, records = [given.tokens[token:stop]], given.records[record:last]
        yield Sequence(parts, lengths, blanks, Place._make(place), num_tokens, records, problems)
        token, record = stop, last


def ids_and_labels(tokens: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tell tokens of documents from their targets; both of shape [tokens], signed."""
    if tokens.dtype.kind == "u":
        # Wide enough for IGNORED; none is context.
        tokens = tokens.astype(np.int32)
    is_context = tokens < 0
    return np.where(is_context, ~tokens, tokens), np.where(is_context, tokens.dtype.type(IGNORED), tokens)
