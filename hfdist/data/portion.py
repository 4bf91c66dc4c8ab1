"""Documents that were read together, as columns: an array for each thing that is known of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.records import Fate
from hfdist.errors import DataError

_FATES = tuple(Fate)


@dataclass(frozen=True, slots=True)
class Document:
    """A document, and what is to become of it."""

    number: int
    tokens: NDArray[Any]
    """Empty unless the fate is `trained` or `quarantined`; complements (negative) are no targets. Shape [tokens],
    uint16 or int32, perhaps a view of a file."""
    fate: Fate
    error: DataError | None = None
    """Why it is bad."""
    cut_tokens: int = 0
    """How many `data.too_long` has cut off."""


class TokenColumns(NamedTuple):
    """Rows of a shard as tokens."""

    tokens: NDArray[Any]
    """Of these rows and perhaps of others; uint16, or int32 with complements. Shape [tokens]."""
    starts: NDArray[np.int64]
    """Where each row begins; shape [rows], as all below."""
    lengths: NDArray[np.int64]
    """With the end-of-text token behind."""
    digests: NDArray[np.uint64]
    """`tokenize.text_digest` of each text: decides whether it is held out."""


class ManyColumns(NamedTuple):
    """Rows of one shard or of several as tokens; the fields are those of the same name above."""

    tokens: Sequence[NDArray[Any]]
    arrays: NDArray[np.int64]
    """In which of them each row lies."""
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]

    @classmethod
    def join(cls, columns: Sequence[TokenColumns], places: NDArray[np.int64]) -> ManyColumns:
        """Join columns; `places` are those of their rows in what is given, one behind the other."""
        order = np.empty_like(places)
        order[places] = np.arange(len(places))
        arrays = np.repeat(np.arange(len(columns)), [len(one.starts) for one in columns])
        tokens, *others = zip(*columns, strict=True)
        starts, lengths, digests = (np.concatenate(one)[order] for one in others)
        return cls(tokens, arrays[order], starts, lengths, digests)


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Documents in the order asked for."""

    numbers: NDArray[np.int64]
    """Canonical; shape [documents], as all but `tokens`."""
    tokens: Sequence[NDArray[Any]]
    """Arrays of these documents and perhaps of others; uint16, or int32 with complements, which are no targets."""
    arrays: NDArray[np.int64]
    """In which of them the tokens of each document lie."""
    starts: NDArray[np.int64]
    """Where they begin there."""
    lengths: NDArray[np.int64]
    """0 unless the fate is `trained` or `quarantined`."""
    cut_tokens: NDArray[np.int64]
    """How many `data.too_long` has cut off."""
    fates: NDArray[np.int64]
    errors: Mapping[int, DataError]
    """Why a document is bad, by its place here."""

    def documents(self) -> list[Document]:
        """Give them one by one."""
        starts, stops = self.starts.tolist(), (self.starts + self.lengths).tolist()
        others = (column.tolist() for column in (self.numbers, self.arrays, self.fates, self.cut_tokens))
        return [
            Document(number, self.tokens[array][start:stop], _FATES[fate], self.errors.get(place), cut_tokens)
            for place, (start, stop, number, array, fate, cut_tokens) in enumerate(
                zip(starts, stops, *others, strict=True)
            )
        ]
