"""Pieces of a model's weights as pieces of the tensors in its files, which may be cut and ordered in another way.

A piece covers boxes of its tensor, as a tensor of the files does. Each overlap becomes a piece of the files' tensor:

    experts.gate_up_proj [2, 4, 2]      rank 0 holds the first expert      experts.0.gate_proj.weight [2, 2]
                                                                           experts.0.up_proj.weight   [2, 2]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import torch

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.models.names.hub_names import HubNames
from hfdist.models.names.strides import Block, Dim

NAMED_AS_WEIGHTS = (WEIGHT, MASTER)
"""Keys of what has the names of the files. A master may be read from a weight, and the other way round."""

_Box = tuple[tuple[int, int], ...]
"""First index and one past the last, for each dimension."""


def hub_pieces(pieces: Iterable[Piece], names: HubNames | None) -> Iterator[Piece]:
    """Give weights and masters under the names of the files; what the files do not have, and all else, as it is."""
    for piece in pieces:
        blocks = names.blocks.get(piece.name) if names is not None and piece.key in NAMED_AS_WEIGHTS else None
        if names is None or blocks is None:
            yield piece
            continue
        for name, block in blocks:
            shape = names.shapes[name]
            if block.dims == _all_of(piece) and math.prod(shape) == piece.total:
                yield replace(piece, name=name, shape=shape)
            elif piece.view.numel() > 0 and block.source < piece.stop and piece.start < block.stop:
                yield from _cut(piece, block, name, shape)


def _all_of(piece: Piece) -> tuple[Dim, ...]:
    """The steps of a block that is the whole tensor, in its own order."""
    return (Dim(piece.total, 1, 1),) if piece.total > 1 else ()


def _cut(piece: Piece, block: Block, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Give the parts of a piece that lie in a block."""
    # Both are boxes in a grid of the tensor's elements.
    #
    #   the piece     elements 0 to 8 of experts.gate_up_proj, 16 elements    rows 0-4 of 8, columns 0-2
    #   the block     experts.0.up_proj.weight: 2 rows that are 2 elements
    #                 apart, of 2 elements, from element 4                    rows 2-4 of 8, columns 0-2
    #   the overlap   from element 4 of the view, to element 0 of the block   rows 2-4 of 8, columns 0-2
    grid, memory = _Grid.of(piece, block), _Memory.of(piece)
    dims = {dim.source: dim for dim in _nested(block.dims, grid.strides)}
    block_box = [
        (first, first + dims[stride].size if stride in dims else first + 1)
        for first, stride in zip(grid.indices(block.source), grid.strides, strict=True)
    ]
    for box in grid.boxes(piece):
        both = zip(box, block_box, strict=True)
        overlap = [(max(low, begin), min(high, end)) for (low, high), (begin, end) in both]
        if any(low >= high for low, high in overlap):
            continue
        first, target, view_dims = memory.address(0), block.target, []
        for (low, high), (begin, _), stride in zip(overlap, block_box, grid.strides, strict=True):
            distance = memory.distance(stride)
            first += low * distance
            if stride in dims:
                target += (low - begin) * dims[stride].target
                view_dims.append(Dim(high - low, distance, dims[stride].target))
        yield from _runs(replace(piece, name=name, shape=shape), memory.rows, view_dims, first, target)


class _Grid(NamedTuple):
    """A shape of a tensor with a dimension for each step of a block, and one for the runs of a piece."""

    sizes: list[int]
    strides: list[int]

    @classmethod
    def of(cls, piece: Piece, block: Block) -> _Grid:
        steps = {1, *(dim.source for dim in block.dims), *([piece.pitch] if piece.run else [])}
        strides = sorted(steps, reverse=True)
        sizes = [before // after for before, after in pairwise((piece.total, *strides))]
        assert math.prod(sizes) == piece.total, (piece, block)
        return cls(sizes, strides)

    def indices(self, element: int) -> list[int]:
        """Give the index of an element along each dimension."""
        indices = []
        for stride in self.strides:
            index, element = divmod(element, stride)
            indices.append(index)
        return indices

    def boxes(self, piece: Piece) -> Iterator[_Box]:
        """Cover a piece with boxes."""
        if not piece.run:
            yield from _cover(piece.start, piece.stop, self.sizes)
            return
        inner = self.strides.index(piece.pitch) + 1
        first, column = divmod(piece.start, piece.pitch)
        rows = _cover(first, first + piece.view.numel() // piece.run, self.sizes[:inner])
        columns = list(_cover(column, column + piece.run, self.sizes[inner:]))
        for of_rows, of_columns in product(rows, columns):
            yield of_rows + of_columns


class _Memory(NamedTuple):
    """Where the elements of a piece are in the memory of its view, by their numbers in the tensor."""

    rows: torch.Tensor
    """The view, of shape [runs, elements of a run]."""
    pitch: int
    """Distance of two runs in the tensor."""
    start: int
    """Number of the view's first element."""

    @classmethod
    def of(cls, piece: Piece) -> _Memory:
        rows = piece.view.detach().view(-1, piece.run or piece.view.numel())
        return cls(rows, piece.pitch or piece.total, piece.start)

    def distance(self, num_elements: int) -> int:
        """Give how far apart two elements are in memory that are so far apart in the tensor: whole rows, or less."""
        num_rows, num_columns = divmod(num_elements, self.pitch)
        return num_rows * self.rows.stride(0) + num_columns * self.rows.stride(1)

    def address(self, element: int) -> int:
        """Give the offset of an element in the storage; the view need not reach it."""
        return int(self.rows.storage_offset()) + self.distance(element) - self.distance(self.start)


def _nested(dims: Iterable[Dim], strides: Sequence[int]) -> Iterator[Dim]:
    """Split steps at the strides that lie within them."""
    for size, source, target in dims:
        for stride in strides:
            if source < stride < source * size:
                number = stride // source
                assert size % number == 0, (dims, strides)
                yield Dim(size // number, stride, target * number)
                size = number
        yield Dim(size, source, target)


def _cover(start: int, stop: int, sizes: Sequence[int]) -> Iterator[_Box]:
    """Cover elements [start, stop) of a flattened tensor with boxes."""
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last or (first + 1 == last and end == 0 and begin > 0):
        for box in _cover(begin, end or inner, sizes[1:]):
            yield ((first, first + 1), *box)
        return
    if begin > 0:
        for box in _cover(begin, inner, sizes[1:]):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    if end > 0:
        for box in _cover(0, end, sizes[1:]):
            yield ((last, last + 1), *box)


def _runs(piece: Piece, rows: torch.Tensor, dims: Iterable[Dim], first: int, target: int) -> Iterator[Piece]:
    """Give what lies at these steps of the view's memory, and of the target, as equal runs at equal distances."""
    outer = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.target)
    inner: list[Dim] = []
    run, number, pitch = 1, 1, 0
    while outer and outer[-1].target == run:
        inner.insert(0, outer.pop())
        run *= inner[0].size
    while outer and (pitch == 0 or outer[-1].target == pitch * number):
        inner.insert(0, outer.pop())
        pitch = pitch or inner[0].target
        number *= inner[0].size
    sizes, distances = [dim.size for dim in inner], [dim.source for dim in inner]
    for indices in product(*(range(dim.size) for dim in outer)):
        offset = first + sum(index * dim.source for index, dim in zip(indices, outer, strict=True))
        start = target + sum(index * dim.target for index, dim in zip(indices, outer, strict=True))
        view = rows.as_strided(sizes, distances, offset)
        yield replace(piece, start=start, view=view, run=run if pitch else 0, pitch=pitch)
