"""Documents that were read together, as columns: an array for each thing that is known of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.records import Status
from hfdist.errors import DataError

_FATES = tuple(Status)


@dataclass(frozen=True, slots=True)
class Document:
    """A document, and what is to become of it."""

    number: int
    tokens: NDArray[Any]
    """Empty unless the fate is `trained` or `quarantined`; complements (negative) are no targets. Shape [tokens],
    uint16 or int32, perhaps a view of a file."""
    fate: Status
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
class DocumentBatch:
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

    @classmethod
    def join(cls, chunks: Sequence[DocumentBatch]) -> DocumentBatch:
        """Put one or more behind each other."""
        tokens = [array for chunk in chunks for array in chunk.tokens]
        arrays_before = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks[:-1])]).tolist()
        documents_before = np.cumsum([0, *(len(chunk.numbers) for chunk in chunks[:-1])]).tolist()
        return cls(
            numbers=np.concatenate([chunk.numbers for chunk in chunks]),
            tokens=tokens,
            arrays=np.concatenate([one.arrays + before for one, before in zip(chunks, arrays_before, strict=True)]),
            starts=np.concatenate([chunk.starts for chunk in chunks]),
            lengths=np.concatenate([chunk.lengths for chunk in chunks]),
            cut_tokens=np.concatenate([chunk.cut_tokens for chunk in chunks]),
            fates=np.concatenate([chunk.fates for chunk in chunks]),
            errors={
                before + place: error
                for one, before in zip(chunks, documents_before, strict=True)
                for place, error in one.errors.items()
            },
        )

    def part(self, start: int, stop: int) -> DocumentBatch:
        """Give neighbouring documents."""
        return DocumentBatch(
            numbers=self.numbers[start:stop],
            tokens=self.tokens,
            arrays=self.arrays[start:stop],
            starts=self.starts[start:stop],
            lengths=self.lengths[start:stop],
            cut_tokens=self.cut_tokens[start:stop],
            fates=self.fates[start:stop],
            errors={place - start: error for place, error in self.errors.items() if start <= place < stop},
        )

    def documents(self) -> list[Document]:
        """Give them one by one."""
        columns = (column.tolist() for column in (self.numbers, self.fates, self.cut_tokens))
        tokens = slices(self.tokens, self.arrays, self.starts, self.lengths)
        return [
            Document(number, own, _FATES[fate], self.errors.get(place), cut_tokens)
            for place, (own, number, fate, cut_tokens) in enumerate(zip(tokens, *columns, strict=True))
        ]


def slices(
    tokens: Sequence[NDArray[Any]] | Mapping[int, NDArray[Any]],
    arrays: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> list[NDArray[Any]]:
    """Views of tokens: of the array by each number, so many from each start; the columns are of one length."""
    spans = zip(arrays.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
    return [tokens[array][start:stop] for array, start, stop in spans]
