"""Pieces of parameters that are cut over tensor ranks: rows, columns, or a part of each of several packed matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from hfdist.checkpoint.piece import Piece


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What this rank holds of one parameter: along one dimension, one part or several."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    parts: tuple[tuple[int, int], ...]
    """First index and one past the last, along `dim`; the rank holds them one behind the other."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """Give pieces of the whole tensor, from a piece of rows of what the rank holds as if that were whole."""
        row, local_row = math.prod(self.shape[1:]), math.prod(self.local_shape[1:])
        first, num_rows = piece.start // local_row, len(piece.view)
        begins = accumulate((stop - start for start, stop in self.parts), initial=0)
        if piece.view.numel() == 0:
            yield replace(piece, shape=self.shape, start=0)
        elif self.dim == 0:
            for begin, (start, stop) in zip(begins, self.parts, strict=False):
                low, high = max(first, begin), min(first + num_rows, begin + stop - start)
                if low < high:
                    view = piece.view[low - first : high - first]
                    yield replace(piece, shape=self.shape, start=(start + low - begin) * row, view=view)
        else:
            inner = math.prod(self.shape[self.dim + 1 :])
            for begin, (start, stop) in zip(begins, self.parts, strict=False):
                yield replace(
                    piece,
                    shape=self.shape,
                    start=first * row + start * inner,
                    run=(stop - start) * inner,
                    pitch=self.shape[self.dim] * inner,
                    view=piece.view.narrow(self.dim, begin, stop - start),
                )
