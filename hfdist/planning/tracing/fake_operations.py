"""What one operation gives on fake tensors.

What comes from whole numbers alone (masks, positions, targets) is computed for real, so that a model that asks how many
there are gets its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

Operation = Callable[..., Any]
"""An operation of torch, whose class is private."""
Arguments = tuple[Any, ...]
"""Arguments of an operation: tensors, lists of them, numbers, types."""
Named = dict[str, Any]
"""Arguments that are given by name."""

_MOST_REAL = 2**20
"""Most elements of a tensor of whole numbers that is computed for real."""
_aten = torch.ops.aten
_EXCHANGE = torch.ops.c10d.alltoall_base_.default
_TOP = _aten.topk.default
_GROUPED = _aten._grouped_mm.default
_FILLED = {_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format}
_WHOLE = {torch.int64, torch.int32, torch.bool}
_RANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}


def tensors_of(values: object) -> Iterator[torch.Tensor]:
    """List the tensors of the arguments or outputs of an operation."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_of(value)


def run_operation(operation: Operation, types: tuple[type, ...], args: Arguments, kwargs: Named) -> object:
    """Run an operation: for real, where its tensors are real and small.

    Args:
        operation: an operation of torch.
        types: types of its tensors.
        args: arguments by position.
        kwargs: arguments by name.
    """
    if FakeTensor in types:
        if operation is _GROUPED:
            return _grouped_product(*args, **kwargs)
        output = operation(*_without_masks(operation, args), **kwargs)
        return _even_choices(output, args[0].shape[-1]) if operation is _TOP else output
    if not _is_known(operation, args, kwargs):
        return operation(*args, **kwargs)
    with unset_fake_temporarily():
        output = operation(*args, **kwargs)
        if operation is _EXCHANGE and args[0].shape == args[1].shape:
            # A fake process group brings nothing; all ranks send alike.
            args[0].copy_(args[1])
    return output


def _is_known(operation: Operation, args: Arguments, kwargs: Named) -> bool:
    """Whether an operation without fake tensors makes a small one, so that it can be computed for real."""
    tensors = list(tensors_of(args))
    if not tensors:
        if operation in _RANGES:
            return all(abs(number) <= _MOST_REAL for number in args)
        return operation in _FILLED and kwargs.get("dtype") in _WHOLE and math.prod(args[0]) <= _MOST_REAL
    try:
        size = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        size = sum(tensor.numel() for tensor in tensors)
    return size <= _MOST_REAL


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, *_: object, **__: object
) -> torch.Tensor:
    """Do what torch's own does for fake tensors, which knows bfloat16 only, as a GPU; a CPU takes each type."""
    groups = [offs.shape[0]] if left.ndim == right.ndim == 2 else [left.shape[0]] if left.ndim == right.ndim else []
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _even_choices(output: tuple[torch.Tensor, torch.Tensor], num_choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a router choose all of its experts equally often: how many tokens each gets is the size of what follows."""
    values, indices = output
    with unset_fake_temporarily():
        chosen = torch.arange(indices.numel()).remainder(num_choices).view(indices.shape)
    return values, chosen


def _without_masks(operation: Operation, args: Arguments) -> Arguments:
    """Name the chosen rows by their numbers, where a mask is known: how many there are follows from its values."""
    if operation is not _aten.index.Tensor:
        return args
    values, indices = args
    named: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and type(index) is torch.Tensor:
            with unset_fake_temporarily():
                named += index.nonzero().unbind(1)
        else:
            named.append(index)
    return values, named
