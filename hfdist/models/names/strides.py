"""Follows the elements of tensors through operations that only move them, from shapes alone: no memory, no values."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch


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
    target: int
    dims: tuple[Dim, ...]
    """Dimensions of more than one element each, the largest step in the target first. All steps go forward, and no two
    neighbours could be one dimension in both tensors."""

    @property
    def stop(self) -> int:
        """One past the last element in the source."""
        return self.source + sum((dim.size - 1) * dim.source for dim in self.dims) + 1


class UnfollowedError(NotImplementedError):
    """An operation that does more than to move elements, or moves them where no steps of equal sizes lead."""


_Factors = tuple[tuple[int, int], ...]
"""A dimension as nested steps: number and distance, the outermost first."""


class _Layout(NamedTuple):
    """Which addresses a tensor's elements have."""

    offset: int
    dims: tuple[_Factors, ...]

    @classmethod
    def whole(cls, offset: int, shape: Sequence[int]) -> _Layout:
        return cls(offset, tuple(((size, distance),) for size, distance in zip(shape, row_strides(shape), strict=True)))

    def regrouped(self, shape: Sequence[int]) -> _Layout:
        """The same elements in the same order, in another shape."""
        factors = [factor for dim in self.dims for factor in dim if factor[0] != 1][::-1]
        dims = []
        for size in shape:
            dim: list[tuple[int, int]] = []
            while size > 1:
                number, distance = factors.pop()
                inner = math.gcd(size, number)
                if inner == number:
                    dim.append((number, distance))
                elif inner == size:
                    dim.append((size, distance * (number // size)))
                    factors.append((number // size, distance))
                else:
                    raise UnfollowedError(f"a reshape that mixes {number} with {size}")
                size //= inner
            dims.append(tuple(dim))
        return _Layout(self.offset, tuple(dims))

    def narrowed(self, dim: int, start: int, length: int) -> _Layout:
        """The elements from `start` on along one dimension, `length` of them."""
        offset, kept = self.offset, []
        factors = self.dims[dim]
        for place, (_, distance) in enumerate(factors):
            inner = math.prod(number for number, _ in factors[place + 1 :])
            first, start = divmod(start, inner)
            offset += first * distance
            if start == 0 and length % inner == 0:
                kept = [(length // inner, distance), *factors[place + 1 :]]
                break
            if start + length > inner:
                raise UnfollowedError("a cut across steps")
        return _Layout(offset, (*self.dims[:dim], tuple(kept), *self.dims[dim + 1 :]))

    def swapped(self, one: int, other: int) -> _Layout:
        dims = list(self.dims)
        dims[one], dims[other] = dims[other], dims[one]
        return _Layout(self.offset, tuple(dims))


def _joined(layouts: Sequence[_Layout], dim: int) -> _Layout:
    """Several layouts one after the other along a dimension: alike but for their addresses, at equal distances."""
    distances = {after.offset - before.offset for before, after in pairwise(layouts)}
    if len(distances) != 1 or len({layout.dims for layout in layouts}) != 1:
        raise UnfollowedError("tensors of several shapes in one")
    first = layouts[0]
    factors = ((len(layouts), distances.pop()), *first.dims[dim])
    return _Layout(first.offset, (*first.dims[:dim], factors, *first.dims[dim + 1 :]))


class _Followed(torch.Tensor):
    """A tensor without values that knows where its elements come from."""

    places: _Layout
    parts: tuple[int, list[_Layout]] | None
    """Where it was joined from tensors of several shapes: the dimension, and those. No operation may follow."""

    @classmethod
    def make(cls, shape: Sequence[int], layout: _Layout) -> _Followed:
        made = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        made.places, made.parts = layout, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> object:
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            out: Any = func(*args, **kwargs)
        if name in _JOINS:
            return _join(name, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), out)
        if out is None:
            raise UnfollowedError(f"{name}, which writes into a tensor")
        if not isinstance(out, torch.Tensor) and name not in _CUTS:
            # A shape, or a number of dimensions.
            return out
        own = args[0]
        if name in _COPIES:
            return own
        if own.parts is not None:
            raise UnfollowedError(f"{name} of what was joined from tensors of several shapes")
        if name in _REGROUPS:
            return cls.make(out.shape, own.places.regrouped(out.shape))
        if name in _SWAPS:
            one, other = args[1:] or (kwargs["dim0"], kwargs["dim1"])
            return cls.make(out.shape, own.places.swapped(one % own.ndim, other % own.ndim))
        if name not in _CUTS:
            raise UnfollowedError(name)
        place = 1 if name == "unbind" else 2
        dim = (args[place] if len(args) > place else kwargs.get("dim", 0)) % own.ndim
        sizes = [1 if name == "unbind" else part.shape[dim] for part in out]
        cuts = [
            own.places.narrowed(dim, begin, size)
            for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        ]
        return tuple(cls.make(part.shape, cut.regrouped(part.shape)) for part, cut in zip(out, cuts, strict=True))


_COPIES = frozenset({"contiguous", "clone", "detach"})
"""Operations that leave each element in its place."""
_REGROUPS = frozenset({"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"})
"""Operations that change the shape alone."""
_SWAPS = frozenset({"transpose", "swapaxes", "swapdims"})
"""Operations that exchange two dimensions."""
_CUTS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})
"""Operations that give several parts."""
_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
"""Operations that take several parts."""


def _join(name: str, parts: Sequence[_Followed], dim: int, out: torch.Tensor) -> _Followed:
    dim %= out.ndim
    layouts = [part.places for part in parts]
    if name == "stack":
        layouts = [_Layout(own.offset, (*own.dims[:dim], (), *own.dims[dim:])) for own in layouts]
    if any(part.parts is not None for part in parts):
        raise UnfollowedError(f"{name} of what was joined from tensors of several shapes")
    if len(layouts) == 1:
        return _Followed.make(out.shape, layouts[0])
    try:
        return _Followed.make(out.shape, _joined(layouts, dim))
    except UnfollowedError:
        made = _Followed.make(out.shape, layouts[0])
        made.parts = dim, layouts
        return made


def follow(
    shapes: Mapping[str, Sequence[int]], convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
    """Give for each tensor that `convert` makes its shape, and the blocks of the given tensors that it consists of.

    Raises:
        UnfollowedError: it does more than to move elements in steps of equal sizes.
    """
    # All lie one after the other, so that an address says which tensor it is in.
    begins = list(accumulate(map(math.prod, shapes.values()), initial=0))
    given = {
        name: _Followed.make(shape, _Layout.whole(begin, shape))
        for (name, shape), begin in zip(shapes.items(), begins, strict=False)
    }
    found = _Sources(list(shapes), begins)
    made = {}
    for name, tensor in convert(dict(given)).items():
        if not isinstance(tensor, _Followed):
            raise UnfollowedError(f"{name} is made of no given tensor")
        made[name] = tuple(tensor.shape), list(_blocks(tensor, found))
    return made


class _Sources(NamedTuple):
    names: list[str]
    begins: list[int]
    """Address of the first element of each, and one past the last of all."""

    def blocks(self, offset: int, target: int, dims: list[Dim]) -> Iterator[Block]:
        """Give what lies at these steps from an address: blocks of one source each, with steps forward alone."""
        number = bisect_right(self.begins, offset, hi=len(self.names)) - 1
        begin, end = self.begins[number : number + 2]
        stop = offset + sum((dim.size - 1) * dim.source for dim in dims) + 1
        # What is joined in another order than it lies, or twice, has steps that go back, or stay; of nothing, none.
        divided = next((dim for dim in dims if dim.source <= 0 or dim.size == 0), None)
        if divided is None and stop > end:
            divided = max(dims, key=lambda dim: dim.source)
        if divided is None:
            yield Block(self.names[number], offset - begin, target, _merged(dims))
            return
        rest = [dim for dim in dims if dim is not divided]
        for index in range(divided.size):
            yield from self.blocks(offset + index * divided.source, target + index * divided.target, rest)


def _blocks(tensor: _Followed, sources: _Sources) -> Iterator[Block]:
    shape = tuple(tensor.shape)
    strides, position = row_strides(shape), 0
    dim, layouts = tensor.parts or (0, [tensor.places])
    for layout in layouts:
        dims = [
            Dim(*factor)
            for factors, stride in zip(layout.dims, strides, strict=True)
            for factor in _placed(factors, stride)
        ]
        yield from sources.blocks(layout.offset, position, dims)
        if tensor.parts is not None:
            position += math.prod(number for number, _ in layout.dims[dim]) * strides[dim]


def _placed(factors: _Factors, stride: int) -> Iterator[tuple[int, int, int]]:
    """The steps of a dimension in both tensors; in the target elements of it are `stride` apart."""
    inner = math.prod(number for number, _ in factors)
    for number, distance in factors:
        inner //= number
        yield number, distance, inner * stride


def _merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    merged: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.target):
        if merged and (merged[-1].source, merged[-1].target) == (dim.size * dim.source, dim.size * dim.target):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return tuple(merged)


def row_strides(shape: Sequence[int]) -> list[int]:
    """Give the distance of neighbours along each dimension of a contiguous tensor."""
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]
