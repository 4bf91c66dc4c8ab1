"""Pieces of a model whose parameters are held whole; and what any optimizer keeps for a parameter or a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfdist.checkpoint.piece import NUMBER, STEP, TRAINED, WEIGHT, Piece
from hfdist.errors import CheckpointError
from hfdist.models.partitioning import whole_shape
from hfdist.optim.joined import Group
from hfdist.optim.probe import (
    is_plain_number,
    moving_options,
    starts_from_zeros,
    state_after_step,
    state_before_step,
    zeroed,
)

_LARGEST_SAMPLE = {1: 8192}
"""Sides of the sample from which is learned what is kept for larger tensors; by the number of dimensions."""
_LARGEST_SIDE = 96

_moving: WeakKeyDictionary[torch.optim.Optimizer, list[str]] = WeakKeyDictionary()


def list_pieces(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    skips_state: Callable[[torch.Tensor], bool] = lambda _: False,
) -> Iterator[Piece]:
    """List weights, persistent buffers and optimizer state, all whole; tied weights once, under their first name.

    State that the optimizer has not made yet is made first, as zeros, where its first step would do so. Without an
    optimizer there are weights only. Neither has wrappers. `skips_state` says of which parameters no state is listed.

    Raises:
        CheckpointError: an optimizer that keeps what is neither a number nor a tensor.
    """
    reader = None if optimizer is None else StateReader(optimizer)
    param_groups = [] if optimizer is None else optimizer.param_groups
    groups = {id(parameter): group for group in param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        yield Piece(name=name, key=WEIGHT, shape=shape, start=0, view=parameter.detach())
        group = groups.get(id(parameter))
        is_stepped = group is not None and parameter.requires_grad and parameter.numel() > 0
        if reader is not None and group is not None and is_stepped and not skips_state(parameter):
            yield from reader.pieces_of(name, group, parameter)
    yield from list_buffers(model)


def list_buffers(model: nn.Module) -> Iterator[Piece]:
    """List the buffers that belong to the model's state dict; every layout holds them whole."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield Piece(name=name, key=WEIGHT, shape=tuple(buffer.shape), start=0, view=buffer)


def list_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Give the whole shape of all that `list_pieces` lists of a whole model without an optimizer, by name."""
    # ZeRO-3 partitions parameters while the model is made.
    shapes = {name: whole_shape(p) for name, p in model.named_parameters()}
    return shapes | {piece.name: piece.shape for piece in list_buffers(model)}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the optimizer keeps for one parameter or flat buffer."""

    numbers: list[Piece]
    """Pieces of single numbers, without a name."""
    tensors: dict[str, torch.Tensor]
    """Tensors by key."""

    def numbers_of(self, name: str) -> Iterator[Piece]:
        """The numbers as those of a parameter."""
        for piece in self.numbers:
            yield Piece(name=name, key=piece.key, shape=(), start=0, view=piece.view, set_number=piece.set_number)


class StateReader:
    """Looks at the state of an unwrapped optimizer, once for each save or load; makes what is not there yet."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Before any step all states are made, to be read into.
        self._is_new = not any(optimizer.state.values())
        if optimizer not in _moving:
            _moving[optimizer] = moving_options(optimizer)
        self._of_groups: dict[int, list[Piece]] = {}

    def pieces_of(self, name: str, group: Group, parameter: torch.Tensor) -> Iterator[Piece]:
        """List the state of a parameter that is whole."""
        kept = self.kept_for(group, parameter)
        yield from kept.numbers_of(name)
        for key, value in kept.tensors.items():
            yield Piece(name=name, key=key, shape=tuple(value.shape), start=0, view=value)

    def kept_for(self, group: Group, parameter: torch.Tensor) -> Kept:
        """Give the state of what the optimizer steps: a parameter of this group, whole, or a flat buffer.

        Raises:
            CheckpointError: something that is neither a number nor a tensor.
        """
        state = self._optimizer.state.get(parameter) or self._make(group, parameter)
        numbers, tensors = [], {}
        for key, value in state.items():
            if torch.is_tensor(value) and not self._is_number(value, key, group, parameter):
                tensors[key] = value
            elif torch.is_tensor(value) or is_plain_number(value):
                numbers.append(_number(STEP if key == STEP else f"{NUMBER}{key}", state, key))
            elif value is not None:
                raise CheckpointError(
                    "the state of this optimizer cannot be saved by parameter name",
                    where="optimizer",
                    found=f"{type(self._optimizer).__name__} keeps {key}: a {type(value).__name__}",
                    allowed="numbers and tensors",
                    hint="save_strategy='no' (checkpoint=none), or another optimizer",
                )
        if id(group) not in self._of_groups:
            self._of_groups[id(group)] = [
                _number(f"{NUMBER}group/{key}", group, key) for key in _moving[self._optimizer]
            ]
        numbers += self._of_groups[id(group)]
        if not numbers:
            numbers.append(Piece(name="", key=TRAINED, shape=(), start=0, view=torch.ones(())))
        return Kept(numbers=numbers, tensors=tensors)

    def _make(self, group: Group, parameter: torch.Tensor) -> dict[str, object]:
        """Make what the first step would, as zeros, where zeros stand for nothing or nothing is done yet."""
        try:
            made = state_before_step(self._optimizer, group, parameter)
            if not made and (self._is_new or starts_from_zeros(self._optimizer, group)):
                made = _zeros(self._optimizer, group, parameter)
        except Exception as error:  # of the user's class: any
            raise CheckpointError(
                "it cannot be found out what this optimizer keeps, so no checkpoint can hold it",
                where="optimizer",
                found=f"{type(self._optimizer).__name__}: {error}",
                hint="save_strategy='no' (checkpoint=none), or another optimizer",
            ) from error
        if any(value is not None for value in made.values()):
            self._optimizer.state[parameter] = made
        return made

    def _is_number(self, value: torch.Tensor, key: str, group: Group, parameter: torch.Tensor) -> bool:
        if value.numel() != 1:
            return False
        if parameter.numel() != 1:
            return True
        # Of a parameter of one element all is one number: a larger one tells.
        larger = parameter.new_zeros([2] * max(parameter.dim(), 1))
        return bool(state_after_step(self._optimizer, group, larger)[key].numel() == 1)


def _zeros(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """What it keeps for this parameter, learned from a smaller one where there is one number for each element."""
    largest = _LARGEST_SAMPLE.get(parameter.dim(), _LARGEST_SIDE)
    sides = [min(side, largest) for side in parameter.shape]
    sample = torch.empty(sides, dtype=parameter.dtype, device=parameter.device)
    state = state_after_step(optimizer, group, sample)
    tensors = [value for value in state.values() if torch.is_tensor(value)]
    if sample.shape == parameter.shape or any(t.numel() != 1 and t.shape != sample.shape for t in tensors):
        return zeroed(state_after_step(optimizer, group, parameter))
    return {
        key: torch.zeros_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
        if torch.is_tensor(value) and value.shape == sample.shape
        else value
        for key, value in zeroed(state).items()
    }


def _number(key: str, holder: dict[str, object], name: str) -> Piece:
    value = holder[name]
    if torch.is_tensor(value):
        return Piece(name="", key=key, shape=(), start=0, view=value)
    kind = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
    set_number = partial(_set, holder, name, type(value))
    return Piece(name="", key=key, shape=(), start=0, view=torch.tensor(value, dtype=kind), set_number=set_number)


def _set(holder: dict[str, object], name: str, kind: type, number: float) -> None:
    holder[name] = kind(number)
