"""Follows the elements of tensors through operations that only move them, to find where each one ends up.

given      q [4, 6]   k [2, 6]
convert    cat([q, k])  ->  qkv [6, 6]
found      elements 0 to 23 of qkv are all of q, elements 24 to 35 all of k
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hfdist.models.names.strides import Addresses, Block, Dim, UnfollowedError, join_addresses, row_strides


class Made(NamedTuple):
    """A tensor that is made of others."""

    shape: tuple[int, ...]
    blocks: list[Block]
    """The blocks of the given tensors that it consists of."""


def follow(
    shapes: Mapping[str, Sequence[int]], convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> dict[str, Made]:
    """Find which elements of given tensors the tensors that `convert` makes consist of.

    Args:
        shapes: shapes of the given tensors by name.
        convert: takes the given tensors by name, without values, and gives new ones by name.

    Returns:
        By the name of a new tensor: its shape and its blocks.

    Raises:
        UnfollowedError: `convert` does more than to move elements in steps of equal sizes.
    """
    begins = list(accumulate(map(math.prod, shapes.values()), initial=0))
    given = {
        name: _Followed.make(shape, Addresses.whole(begin, shape))
        for (name, shape), begin in zip(shapes.items(), begins, strict=False)
    }
    sources = _Sources(list(shapes), begins)
    made = {}
    for name, tensor in convert(dict(given)).items():
        if not isinstance(tensor, _Followed):
            raise UnfollowedError(f"{name} is made of no given tensor")
        made[name] = Made(tuple(tensor.shape), list(_blocks(tensor, sources)))
    return made


class _Joined(NamedTuple):
    """Parts of several shapes that were put one after the other."""

    dim: int
    """The dimension along which they were."""
    parts: list[Addresses]


class _Followed(torch.Tensor):
    """A tensor without values that knows where its elements come from."""

    places: Addresses
    """Addresses of the elements among all given tensors end to end; of a joined tensor, those of its first part."""
    joined: _Joined | None
    """The parts of a tensor that was joined from several shapes, after which no operation is followed; else None."""

    @classmethod
    def make(cls, shape: Sequence[int], places: Addresses) -> _Followed:
        """Make a tensor of this shape whose elements have these addresses."""
        made = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        made.places, made.joined = places, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> object:
        """Called by torch for each operation: runs it on shapes, and follows the elements."""
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
        if own.joined is not None:
            raise UnfollowedError(f"{name} of what was joined from tensors of several shapes")
        if name in _REGROUPS:
            return cls.make(out.shape, own.places.regrouped(out.shape))
        if name in _SWAPS:
            one, other = args[1:] or (kwargs["dim0"], kwargs["dim1"])
            return cls.make(out.shape, own.places.swapped(one % own.ndim, other % own.ndim))
        if name not in _CUTS:
            raise UnfollowedError(name)
        # The dimension is the last argument: after the tensor, and but for `unbind` after the sizes.
        dim_place = 1 if name == "unbind" else 2
        dim = (args[dim_place] if len(args) > dim_place else kwargs.get("dim", 0)) % own.ndim
        return _cut(own, dim, out, drops_dim=name == "unbind")


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


def _cut(whole: _Followed, dim: int, parts: Sequence[torch.Tensor], *, drops_dim: bool) -> tuple[_Followed, ...]:
    """Follow a tensor that is cut into parts along a dimension, which `unbind` drops."""
    cut, begin = [], 0
    for part in parts:
        size = 1 if drops_dim else part.shape[dim]
        places = whole.places.narrowed(dim, begin, size)
        cut.append(_Followed.make(part.shape, places.regrouped(part.shape)))
        begin += size
    return tuple(cut)


def _join(name: str, parts: Sequence[_Followed], dim: int, out: torch.Tensor) -> _Followed:
    """Follow tensors that the operation `name` puts one after the other along a dimension of its output."""
    dim %= out.ndim
    places = [part.places for part in parts]
    if name == "stack":
        # A new dimension of one element: it has no steps.
        places = [Addresses(own.offset, (*own.dims[:dim], (), *own.dims[dim:])) for own in places]
    if any(part.joined is not None for part in parts):
        raise UnfollowedError(f"{name} of what was joined from tensors of several shapes")
    if len(places) == 1:
        return _Followed.make(out.shape, places[0])
    try:
        return _Followed.make(out.shape, join_addresses(places, dim))
    except UnfollowedError:
        made = _Followed.make(out.shape, places[0])
        made.joined = _Joined(dim, places)
        return made


class _Sources(NamedTuple):
    """The given tensors, end to end, so that an address says which one it is in."""

    names: list[str]
    begins: list[int]
    """Address of the first element of each, and one past the last of all."""

    def blocks(self, offset: int, target: int, dims: list[Dim]) -> Iterator[Block]:
        """Give the elements at these steps from the address `offset`, as blocks of one source each with steps forward.

        `target`: place of the first of these elements in the new tensor.
        """
        number = bisect_right(self.begins, offset, hi=len(self.names)) - 1
        begin, end = self.begins[number : number + 2]
        stop = offset + sum((dim.size - 1) * dim.source for dim in dims) + 1
        # A dimension is taken apart, index by index, if its steps go back or stay, as where parts are joined in another
        # order than they lie or one part twice; or if its steps lead from one source into the next. A dimension without
        # elements gives no block.
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
    joined = tensor.joined or _Joined(0, [tensor.places])
    for part in joined.parts:
        dims: list[Dim] = []
        for steps, stride in zip(part.dims, strides, strict=True):
            # A dimension of nested steps has its elements one after the other in the target, `stride` apart.
            inner = math.prod(step.number for step in steps)
            for number, distance in steps:
                inner //= number
                dims.append(Dim(number, distance, inner * stride))
        yield from sources.blocks(part.offset, position, dims)
        # The next part begins where this one ends, along the dimension of the join.
        if joined.parts[1:]:
            position += math.prod(step.number for step in part.dims[joined.dim]) * strides[joined.dim]


def _merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Merge dimensions that are one in both tensors, and sort them by their steps in the target, the largest first."""
    merged: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.target):
        if merged and (merged[-1].source, merged[-1].target) == (dim.size * dim.source, dim.size * dim.target):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return tuple(merged)
