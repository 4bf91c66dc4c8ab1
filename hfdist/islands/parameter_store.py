"""Weights and optimizer of a parameter server, in float32 on the CPU, as the ranks of an island exchange them.

All is computed segment by segment, so that one comes to the same bits whichever others are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from hfdist.checkpoint.piece import STEP
from hfdist.config.optimizer import OptimizerConfig
from hfdist.errors import ConfigError
from hfdist.islands.segment import Segment
from hfdist.optim.check import check, describe
from hfdist.optim.probe import Reach, moving_options, starts_from_zeros
from hfdist.optim.registry import find_optimizer, make_small
from hfdist.optim.trial_step import state_after_step


class OptimizerSlots(NamedTuple):
    """What an optimizer keeps."""

    tensors: tuple[str, ...]
    """Keys of tensors as large as the parameter."""
    counts: bool
    """Whether it counts its steps."""


def find_slots(config: OptimizerConfig) -> OptimizerSlots:
    """Find what the optimizer keeps.

    Raises:
        ConfigError: it needs whole parameters, or keeps what a server does not give back.
    """
    optimizer = make_small(config)
    check(optimizer, Reach.element, is_saved=True)
    group, matrix = optimizer.param_groups[0], torch.zeros(4, 4)
    state = state_after_step(optimizer, group, matrix)
    tensors = tuple(key for key, value in state.items() if torch.is_tensor(value) and value.shape == matrix.shape)
    others = {key for key, value in state.items() if key not in tensors and value is not None} - {STEP}
    if others or moving_options(optimizer) or not starts_from_zeros(optimizer, group):
        what = "a parameter server keeps for each weight what begins at zero, and a number of steps"
        found = f"{describe(optimizer)}: {', '.join(sorted(others)) or 'it begins otherwise'}"
        hint = "optimizer.name=adamw, or islands=diloco"
        raise ConfigError(what, where="optimizer.name, islands.method", found=found, hint=hint)
    return OptimizerSlots(tensors, STEP in state)


class ParameterStore:
    """Steps with gradients of all ranks of an island.

    Args:
        optimizer: whose rate comes with each step.
        segments: by rank.
        contents: by rank: float32 weights, and then each slot of the optimizer.
        updates: steps so far.

    Raises:
        ConfigError: see `find_slots`.
        ValueError: contents of another size.
    """

    def __init__(
        self,
        optimizer: OptimizerConfig,
        segments: Mapping[int, Sequence[Segment]],
        contents: Mapping[int, bytes],
        updates: int,
    ) -> None:
        self.updates = updates
        self.segments = {rank: tuple(own) for rank, own in segments.items()}
        slots = find_slots(optimizer)
        self._values = {
            rank: torch.frombuffer(bytearray(content), dtype=torch.float32).view(1 + len(slots.tensors), -1)
            if content
            else torch.empty(1 + len(slots.tensors), 0)
            for rank, content in contents.items()
        }
        """Weights and slots by rank, of shape [weights and slots, elements]."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._counted: list[nn.Parameter] = []
        """Each element of the model once: tensor ranks hold some of them alike."""
        states, known = {}, set()
        for rank, own in self.segments.items():
            sizes = [segment.num_elements for segment in own]
            if self.num_elements(rank) != sum(sizes):
                raise ValueError(f"{self.num_elements(rank)} weights of rank {rank} are not {sum(sizes)}")
            weights, *kept = (row.split(sizes) if own else () for row in self._values[rank])
            self._parameters[rank] = [nn.Parameter(weight) for weight in weights]
            for place, (segment, parameter) in enumerate(zip(own, self._parameters[rank], strict=True)):
                states[parameter] = {key: kept[number][place] for number, key in enumerate(slots.tensors)}
                if slots.counts:
                    states[parameter][STEP] = torch.tensor(float(updates))
                if segment not in known:
                    known.add(segment)
                    self._counted.append(parameter)
        kind, settings = find_optimizer(optimizer, warmup_steps=0)
        # Only matrices decay, as in the Trainer.
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for rank, own in self.segments.items():
            for segment, parameter in zip(own, self._parameters[rank], strict=True):
                groups[len(segment.shape) >= 2].append(parameter)
        decay = {True: optimizer.weight_decay, False: 0.0}
        settings.pop("weight_decay", None)
        self._optimizer: torch.optim.Optimizer = kind(
            [{"params": own, "weight_decay": decay[is_matrix]} for is_matrix, own in groups.items() if own], **settings
        )
        self._optimizer.state.update(states)

    def num_elements(self, rank: int) -> int:
        """Count the weights of a rank."""
        return self._values[rank].shape[1]

    def begin_step(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def add(self, rank: int, gradients: Sequence[torch.Tensor], weight: float) -> None:
        """Add to the gradients of the step that has begun.

        Args:
            rank: whose segments they belong to.
            gradients: finite float32 of shape [elements], one for each segment.
            weight: by which they are multiplied.
        """
        for parameter, gradient in zip(self._parameters[rank], gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(gradient, alpha=weight)

    def squares(self) -> list[float]:
        """Give the sum of the squares of the gradients, as `exact_sum` does."""
        return exact_sum(
            float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
            for parameter in self._counted
            if parameter.grad is not None
        )

    @torch.no_grad()
    def step(self, scale: float, lr: float) -> None:
        """Step once with the gradients that were added, and forget them.

        Args:
            scale: by which the gradients are multiplied.
            lr: of this step.
        """
        for parameters in self._parameters.values() if scale < 1 else ():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.updates += 1
        self.begin_step()

    def content(self, rank: int, *, with_slots: bool) -> bytes:
        """Give the weights of a rank, and what the optimizer keeps of them."""
        values = self._values[rank]
        return (values if with_slots else values[0]).numpy().tobytes()


def exact_sum(numbers: Iterable[float]) -> list[float]:
    """Give a few numbers whose sum is exactly that of all: the rounded sum, what it lacks, and so on.

    So sums of parts can be added up without an error, whatever the parts are (Shewchuk 1997). Where something is not
    finite, infinity alone is given.
    """
    left, found = list(numbers), list[float]()
    if not all(map(math.isfinite, left)):
        return [math.inf]
    while part := math.fsum(left):
        found.append(part)
        left.append(-part)
    return found
