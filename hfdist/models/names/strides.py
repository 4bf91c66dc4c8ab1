"""Describes where the elements of tensors lie by nested steps through addresses, from shapes alone.

a [4, 6], contiguous                       ((4 at a distance of 6),)  ((6 at 1),)
a.transpose(0, 1)  [6, 4]                  ((6 at 1),)  ((4 at 6),)
that reshaped to  [24]                     ((6 at 1), (4 at 6))       one dimension of two nested steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Dim(NamedTuple):
    """A step of a block: `size` elements at a distance of `source` in one tensor and of `target` in the other."""

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class Block:
    """Elements of a flattened source that stand in a flattened target, in steps of several sizes.

    Element `source + sum(i * dim.source)` of the one is `target + sum(i * dim.target)` of the other, for each `i` of
    each dimension.
    """

    name: str
    """Name of the source."""
    source: int
    """Place of the block's first element in the flattened source."""
    target: int
    """Place of the block's first element in the flattened target."""
    dims: tuple[Dim, ...]
    """Dimensions of more than one element each, the largest step in the target first. All steps go forward, and no two
    neighbours could be one dimension in both tensors."""

    @property
    def stop(self) -> int:
        """One past the last element in the source."""
        return self.source + sum((dim.size - 1) * dim.source for dim in self.dims) + 1


class UnfollowedError(NotImplementedError):
    """Raised for an operation that does not only move elements, or moves them where no steps of equal sizes lead."""


class Step(NamedTuple):
    """A step through addresses: `number` elements at a `distance`."""

    number: int
    distance: int


Steps = tuple[Step, ...]
"""A dimension as nested steps, the outermost first."""


class Addresses(NamedTuple):
    """The addresses of a tensor's elements."""

    offset: int
    """Address of the first element."""
    dims: tuple[Steps, ...]
    """The nested steps of each dimension."""

    @classmethod
    def whole(cls, offset: int, shape: Sequence[int]) -> Addresses:
        """Give the addresses of a contiguous tensor that begins at `offset`."""
        strides = row_strides(shape)
        return cls(offset, tuple((Step(size, stride),) for size, stride in zip(shape, strides, strict=True)))

    def regrouped(self, shape: Sequence[int]) -> Addresses:
        """Give the same elements in the same order, in another shape.

        Raises:
            UnfollowedError: a size is neither a divisor nor a multiple of the steps that it would be made of.
        """
        # The steps that no dimension has taken yet, the outermost last.
        left = [step for dim in self.dims for step in dim if step.number != 1][::-1]
        dims = []
        for size in shape:
            dim: list[Step] = []
            while size > 1:
                number, distance = left.pop()
                inner = math.gcd(size, number)
                if inner == number:
                    dim.append(Step(number, distance))
                elif inner == size:
                    # The dimension takes the inner part of the step, and leaves the outer part to the next one.
                    dim.append(Step(size, distance * (number // size)))
                    left.append(Step(number // size, distance))
                else:
                    raise UnfollowedError(f"a reshape that mixes {number} with {size}")
                size //= inner
            dims.append(tuple(dim))
        return Addresses(self.offset, tuple(dims))

    def narrowed(self, dim: int, start: int, length: int) -> Addresses:
        """Give `length` elements from `start` on, along the dimension `dim`.

        Raises:
            UnfollowedError: no nested steps lead through these elements alone.
        """
        offset, steps = self.offset, self.dims[dim]
        kept: Steps = ()
        for place, (_, distance) in enumerate(steps):
            # Elements that one step at this depth passes over.
            inner = math.prod(step.number for step in steps[place + 1 :])
            first, start = divmod(start, inner)
            offset += first * distance
            if start == 0 and length % inner == 0:
                kept = (Step(length // inner, distance), *steps[place + 1 :])
                break
            if start + length > inner:
                raise UnfollowedError("a cut across steps")
        return Addresses(offset, (*self.dims[:dim], kept, *self.dims[dim + 1 :]))

    def swapped(self, one: int, other: int) -> Addresses:
        """Give the same elements with two dimensions exchanged."""
        dims = list(self.dims)
        dims[one], dims[other] = dims[other], dims[one]
        return Addresses(self.offset, tuple(dims))


def join_addresses(parts: Sequence[Addresses], dim: int) -> Addresses:
    """Give the addresses of two or more parts that are put one after the other along the dimension `dim`.

    Raises:
        UnfollowedError: the parts have several shapes, or are not at equal distances.
    """
    distances = {after.offset - before.offset for before, after in pairwise(parts)}
    if len(distances) != 1 or len({part.dims for part in parts}) != 1:
        raise UnfollowedError("tensors of several shapes in one")
    first, distance = parts[0], distances.pop()
    steps = (Step(len(parts), distance), *first.dims[dim])
    return Addresses(first.offset, (*first.dims[:dim], steps, *first.dims[dim + 1 :]))


def row_strides(shape: Sequence[int]) -> list[int]:
    """Give the distance of neighbours along each dimension of a contiguous tensor."""
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]
