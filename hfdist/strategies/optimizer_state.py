"""What an optimizer keeps for a parameter or a flat buffer, made where it is not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch

from hfdist.checkpoint.piece import NUMBER, STEP, TRAINED, Piece
from hfdist.errors import CheckpointError
from hfdist.optim.joined import Group
from hfdist.optim.probe import moving_options, starts_from_zeros
from hfdist.optim.trial_step import is_plain_number, state_after_step, state_before_step, zeroed

_LARGEST_SIDE = 96
"""Largest side of the sample that shows what is kept for a larger tensor."""
_LARGEST_VECTOR = 8192
"""Largest size of that sample where the tensor has one dimension."""

_moving: WeakKeyDictionary[torch.optim.Optimizer, list[str]] = WeakKeyDictionary()
"""Options of the groups that change while an optimizer steps."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the optimizer keeps for one parameter or flat buffer."""

    numbers: list[Piece]
    """Pieces of single numbers, without a name."""
    tensors: dict[str, torch.Tensor]
    """Tensors by key."""

    def numbers_of(self, name: str) -> Iterator[Piece]:
        """Give the numbers with the name of a parameter."""
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
        # All state of a parameter of one element is one number: a larger parameter tells which is one number always.
        larger = parameter.new_zeros([2] * max(parameter.dim(), 1))
        return bool(state_after_step(self._optimizer, group, larger)[key].numel() == 1)


def _zeros(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Make what it keeps for this parameter, learned from a smaller one where there is one number for each element."""
    largest = _LARGEST_VECTOR if parameter.dim() == 1 else _LARGEST_SIDE
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
    kind = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    set_number = partial(_set, holder, name, type(value))
    return Piece(name="", key=key, shape=(), start=0, view=torch.tensor(value, dtype=kind), set_number=set_number)


def _set(holder: dict[str, object], name: str, kind: type, number: float) -> None:
    holder[name] = kind(number)
