"""Documents as the columns that packing takes."""

from typing import Any, NamedTuple

import numpy as np

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Status
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import DataError


class Document(NamedTuple):
    """One of them, and what is to become of it."""

    number: int
    tokens: Any
    fate: Status = Status.trained
    error: DataError | None = None
    cut_tokens: int = 0


def in_chunks(documents, size, *, epoch=0, first=0):
    """Neighbours of one epoch, `size` at a time, with the places of the first ones; `first`: position of the first."""
    for start in range(0, len(documents), size):
        yield Place(epoch, first + start), columns(documents[start : start + size])


def columns(documents):
    """One chunk, whose tokens begin somewhere in an array."""
    lengths = np.array([len(one.tokens) for one in documents])
    return DocumentBatch(
        numbers=np.array([one.number for one in documents]),
        tokens=[np.concatenate([[7, 7, 7], *(one.tokens for one in documents)]).astype(np.int32)],
        arrays=np.zeros_like(lengths),
        starts=3 + np.cumsum(lengths) - lengths,
        lengths=lengths,
        cut_tokens=np.array([one.cut_tokens for one in documents]),
        fates=np.array([one.fate for one in documents], dtype=np.int64),
        errors={place: one.error for place, one in enumerate(documents) if one.error is not None},
    )


def one_by_one(batch):
    """The documents of a chunk."""
    columns = (column.tolist() for column in (batch.numbers, batch.fates, batch.cut_tokens))
    return [
        Document(number, tokens, Status(fate), batch.errors.get(place), cut_tokens)
        for place, (tokens, number, fate, cut_tokens) in enumerate(zip(batch.views(), *columns, strict=True))
    ]
