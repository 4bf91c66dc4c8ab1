"""Documents that were read together, as columns: an array for each thing that is known of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.errors import DataError


class TokenColumns(NamedTuple):
    """Rows of a shard as tokens."""

    tokens: NDArray[np.integer]
    """Tokens of these rows and perhaps of others; uint16, or int32 with complements. Shape [tokens]."""
    starts: NDArray[np.int64]
    """Where each row begins; shape [rows], as all below."""
    lengths: NDArray[np.int64]
    """Tokens of each row, the end-of-text token at its end included."""
    digests: NDArray[np.uint64]
    """`text_digest` of each text: decides whether it is held out."""


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Documents in the order asked for."""

    numbers: NDArray[np.int64]
    """Canonical numbers of the documents; shape [documents], as all but `tokens`."""
    tokens: Sequence[NDArray[np.integer]]
    """Arrays of these documents and perhaps of others; uint16, or int32 with complements, which are no targets."""
    arrays: NDArray[np.int64]
    """Number of the array in `tokens` that holds each document."""
    starts: NDArray[np.int64]
    """Place in that array where each document begins."""
    lengths: NDArray[np.int64]
    """Tokens of each document; 0 unless its fate is `trained` or `quarantined`."""
    cut_tokens: NDArray[np.int64]
    """Tokens that `data.too_long` has cut off each document."""
    fates: NDArray[np.int64]
    errors: Mapping[int, DataError]
    """Why a document is bad, by its place here."""

    @classmethod
    def join(cls, batches: Sequence[DocumentBatch]) -> DocumentBatch:
        """Join one or more, one after the other."""
        columns = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in _COLUMNS}
        tokens: list[NDArray[np.integer]] = []
        errors: dict[int, DataError] = {}
        first = 0
        for batch in batches:
            stop = first + len(batch.numbers)
            columns["arrays"][first:stop] += len(tokens)
            errors |= {first + place: error for place, error in batch.errors.items()}
            tokens += batch.tokens
            first = stop
        return cls(tokens=tokens, errors=errors, **columns)

    def part(self, start: int, stop: int) -> DocumentBatch:
        """Give neighbouring documents."""
        columns = {name: getattr(self, name)[start:stop] for name in _COLUMNS}
        errors = {place - start: error for place, error in self.errors.items() if start <= place < stop}
        return replace(self, errors=errors, **columns)

    def views(self) -> list[NDArray[np.integer]]:
        """Give the tokens of each document, without a copy; complements (negative) are no targets."""
        return slices(self.tokens, self.arrays, self.starts, self.lengths)


_COLUMNS = ("numbers", "arrays", "starts", "lengths", "cut_tokens", "fates")


_Arrays = Sequence[NDArray[np.integer]] | Mapping[int, NDArray[np.integer]]


def slices(
    tokens: _Arrays, arrays: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[NDArray[np.integer]]:
    """Views of tokens: of the array by each number, so many from each start; the columns are of one length."""
    return views_of(tokens, arrays.tolist(), starts.tolist(), (starts + lengths).tolist())


def views_of(
    tokens: _Arrays, arrays: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[NDArray[np.integer]]:
    """Give what `slices` does, from columns that are lists already, with ends in place of lengths."""
    return [tokens[array][start:stop] for array, start, stop in zip(arrays, starts, stops, strict=True)]
