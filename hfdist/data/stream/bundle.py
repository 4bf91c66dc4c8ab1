"""What a loader process sends to its rank: sequences in few arrays, each of which costs time there and here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, join
from hfdist.data.packing import sequence
from hfdist.data.packing.sequence import Pieces, join_tokens
from hfdist.data.stream.lane import Packed
from hfdist.data.tokenization.image_tokens import Inputs

_Rest = tuple[
    Sequence[int],
    Sequence[tuple[int, int]],
    tuple[int, ...],
    int,
    int,
    tuple[str, ...],
    Mapping[int, Inputs] | None,
]
"""`lengths`, `blanks`, `next_place`, `num_tokens`, `num_documents`, `problems` and `images` of a sequence."""


class Bundle(NamedTuple):
    """Sequences with their lanes and pools."""

    turns: list[tuple[int, int | None]]
    """Lane and pool of each sequence, as in `Packed`."""
    tokens: NDArray[np.integer]
    """Tokens of all sequences, end to end, in their narrow type: the rank makes positions and labels of them."""
    records: Records
    """Records of all, end to end."""
    num_records: list[int]
    rests: list[_Rest]


def bundle(item: Sequence[Packed]) -> Bundle:
    """Copy the tokens and the records of sequences, one or more."""
    sequences = [packed[2] for packed in item]
    return Bundle(
        [(lane, pool) for lane, pool, _ in item],
        join_tokens(Pieces.of(sequences).parts),
        join([one.records for one in sequences]),
        [len(one.records) for one in sequences],
        [
            (
                one.lengths,
                one.blanks,
                tuple(one.next_place),
                one.num_tokens,
                one.num_documents,
                one.problems,
                one.images,
            )
            for one in sequences
        ],
    )


def unbundle(given: Bundle) -> Iterator[Packed]:
    """Give the sequences of a bundle."""
    token, record = 0, 0
    for (lane, pool), num_records, rest in zip(given.turns, given.num_records, given.rests, strict=True):
        lengths, blanks, place, num_tokens, num_documents, problems, images = rest
        stop, last = token + sum(lengths), record + num_records
        parts, records = [given.tokens[token:stop]], given.records[record:last]
        own = parts, lengths, blanks, Place._make(place), num_tokens, num_documents, records
        yield lane, pool, sequence.Sequence(*own, problems, images)
        token, record = stop, last
