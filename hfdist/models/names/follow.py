"""Follows the elements of tensors through operations that only move them: which elements a result consists of."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hfdist.models.names.strides import Addresses, Block, Dim, UnfollowedError, join_addresses, row_strides


def follow(
    shapes: Mapping[str, Sequence[int]], convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
    """Give for each tensor that `convert` makes its shape, and the blocks of the given tensors that it consists of.

    Raises:
        UnfollowedError: it does more than to move elements in steps of equal sizes.
    """
    begins = list(accumulate(map(math.prod, shapes.values()), initial=0))
    given = {
        name: _Followed.make(shape, Addresses.whole(begin, shape))
        for (name, shape), begin in zip(shapes.items(), begins, strict=False)
    }
    found = _Sources(list(shapes), begins)
    made = {}
    for name, tensor in convert(dict(given)).items():
        if not isinstance(tensor, _Followed):
            raise UnfollowedError(f"{name} is made of no given tensor")
        made[name] = tuple(tensor.shape), list(_blocks(tensor, found))
    return made


class _Followed(torch.Tensor):
    """A tensor without values that knows where its elements come from."""

    places: Addresses
    parts: tuple[int, list[Addresses]] | None
    """Where it was joined from tensors of several shapes: the dimension, and those. No operation may follow."""

    @classmethod
    def make(cls, shape: Sequence[int], places: Addresses) -> _Followed:
        made = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        made.places, made.parts = places, None
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
    places = [part.places for part in parts]
    if name == "stack":
        places = [Addresses(own.offset, (*own.dims[:dim], (), *own.dims[dim:])) for own in places]
    if any(part.parts is not None for part in parts):
        raise UnfollowedError(f"{name} of what was joined from tensors of several shapes")
    if len(places) == 1:
        return _Followed.make(out.shape, places[0])
    try:
        return _Followed.make(out.shape, join_addresses(places, dim))
    except UnfollowedError:
        made = _Followed.make(out.shape, places[0])
        made.parts = dim, places
        return made


class _Sources(NamedTuple):
    """The given tensors, end to end, so that an address says which one it is in."""

    names: list[str]
    begins: list[int]
    """Address of the first element of each, and one past the last of all."""

    def blocks(self, offset: int, target: int, dims: list[Dim]) -> Iterator[Block]:
        """Give what lies at these steps from an address: blocks of one source each, with steps forward alone."""
        number = bisect_right(self.begins, offset, hi=len(self.names)) - 1
        begin, end = self.begins[number : number + 2]
        stop = offset + sum((dim.size - 1) * dim.source for dim in dims) + 1
        # A join in another order than parts lie, or of one twice, has steps that go back or stay: they are taken apart.
        # So are steps that lead from one source into the next, and a dimension without elements, which gives no block.
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
    """Give the blocks of all sources that a tensor consists of."""
    strides, position = row_strides(tuple(tensor.shape)), 0
    dim, parts = tensor.parts or (0, [tensor.places])
    for part in parts:
        dims: list[Dim] = []
        for steps, stride in zip(part.dims, strides, strict=True):
            # A dimension of nested steps has its elements one after the other in the target, `stride` apart.
            inner = math.prod(step.number for step in steps)
            for number, distance in steps:
                inner //= number
                dims.append(Dim(number, distance, inner * stride))
        yield from sources.blocks(part.offset, position, dims)
        if tensor.parts is not None:
            position += math.prod(step.number for step in part.dims[dim]) * strides[dim]


def _merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Put dimensions that are one in both tensors together, the largest step in the target first."""
    merged: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.target):
        if merged and (merged[-1].source, merged[-1].target) == (dim.size * dim.source, dim.size * dim.target):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return tuple(merged)
