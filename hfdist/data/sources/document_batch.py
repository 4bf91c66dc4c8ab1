"""Documents that were read together, as columns: one array has one property of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.errors import DataError


class TokenColumns(NamedTuple):
    """Rows of a shard as tokens: row k has `lengths[k]` tokens, from `starts[k]` of `tokens` on."""

    tokens: NDArray[np.integer]
    """Tokens of these rows and perhaps of others, shape [tokens]; uint16, or int32 with complements (no targets)."""
    starts: NDArray[np.int64]
    """Place in `tokens` of the first token of each row; shape [rows]."""
    lengths: NDArray[np.int64]
    """Number of tokens of each row, with the end-of-text token at its end; shape [rows]."""
    digests: NDArray[np.uint64]
    """Hash of the text of each row, which decides whether it is held out; shape [rows]."""


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Documents in the order asked for. All arrays but those in `tokens` have the shape [documents].

    tokens   [ ....aaaaa....bbb.. ]  [ ..cccc ]      document    a   b   c
                   |        |            |           arrays      0   0   1
                   4        13           2           starts      4   13  2
                                                     lengths     5   3   4
    """

    numbers: NDArray[np.int64]
    """Canonical number of each document."""
    tokens: Sequence[NDArray[np.integer]]
    """Tokens of these documents and perhaps of others; uint16, or int32 with complements, which are no targets."""
    arrays: NDArray[np.int64]
    """Number of the array in `tokens` that holds each document."""
    starts: NDArray[np.int64]
    """Place in that array of the first token of each document."""
    lengths: NDArray[np.int64]
    """Number of tokens of each document; 0 unless its fate is `trained` or `quarantined`."""
    cut_tokens: NDArray[np.int64]
    """Number of tokens that `data.too_long` has cut off each document."""
    fates: NDArray[np.int64]
    """`Status` of each document: trained, or why it is not."""
    errors: Mapping[int, DataError]
    """Errors of the bad documents, by their place in this batch."""

    @classmethod
    def join(cls, batches: Sequence[DocumentBatch]) -> DocumentBatch:
        """Join one or more batches, one after the other."""
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
        """Give the documents from place `start` to before `stop`."""
        columns = {name: getattr(self, name)[start:stop] for name in _COLUMNS}
        errors = {place - start: error for place, error in self.errors.items() if start <= place < stop}
        return replace(self, errors=errors, **columns)

    def views(self) -> list[NDArray[np.integer]]:
        """Give the tokens of each document, without a copy; complements (negative) are no targets."""
        return slices(self.tokens, self.arrays, self.starts, self.lengths)


_COLUMNS = ("numbers", "arrays", "starts", "lengths", "cut_tokens", "fates")
"""Fields of a batch that have one number for each document."""

_Arrays = Sequence[NDArray[np.integer]] | Mapping[int, NDArray[np.integer]]


def slices(
    tokens: _Arrays, arrays: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[NDArray[np.integer]]:
    """Give views of tokens: view k is `lengths[k]` tokens from `starts[k]` of the array with the number `arrays[k]`."""
    return views_of(tokens, arrays.tolist(), starts.tolist(), (starts + lengths).tolist())


def views_of(
    tokens: _Arrays, arrays: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[NDArray[np.integer]]:
    """Give views of tokens: view k goes from `starts[k]` to before `stops[k]` in the array number `arrays[k]`."""
    return [tokens[array][start:stop] for array, start, stop in zip(arrays, starts, stops, strict=True)]
