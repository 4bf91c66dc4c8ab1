"""The weights of a parameter server and the optimizer that steps them, in float32 on the CPU.

Each segment (some elements of a parameter) is stepped by itself, so that its bits do not depend on the other segments
that the server has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The state that an optimizer keeps for each parameter."""

    tensors: tuple[str, ...]
    """Keys of the state's tensors, each of the parameter's shape, such as `exp_avg`."""
    counts: bool
    """Whether the state has the number of steps."""


def find_slots(config: OptimizerConfig) -> OptimizerSlots:
    """Find the state that the optimizer of these settings keeps for each parameter, by a step of a small matrix.

    Raises:
        ConfigError: the optimizer needs whole parameters, or its state has something that a server does not give back.
    """
    optimizer = make_small(config)
    check(optimizer, Reach.element, is_saved=True)
    group = optimizer.param_groups[0]
    matrix = torch.zeros(4, 4)
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
    """Weights and an optimizer that steps them once all gradients of a step are added.

    A store has one row of values for the weights and one for each tensor that the optimizer keeps:

        values of rank 0    weight       segment 0 | segment 1 | ...      a parameter is a view of the first row,
                            exp_avg      segment 0 | segment 1 | ...      and its state is views of the others
                            exp_avg_sq   segment 0 | segment 1 | ...

    Args:
        optimizer: the optimizer's settings; each call of `step` brings the rate.
        segments: the segments of each rank of an island, by rank.
        contents: float32 values of each rank as bytes, by rank: the rows above, one after the other.
        updates: number of steps that the optimizer has done so far.

    Raises:
        ConfigError: a parameter server cannot step this optimizer.
        ValueError: the contents of a rank have another size than its segments.
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
        self._values = {rank: _read_rows(content, 1 + len(slots.tensors)) for rank, content in contents.items()}
        """Values of each rank, of shape [weights and tensors of the optimizer, elements]."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        """A parameter for each segment, by rank."""
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for rank, own in self.segments.items():
            sizes = [segment.num_elements for segment in own]
            weights, *rows = self._values[rank]
            if len(weights) != sum(sizes):
                raise ValueError(f"{len(weights)} weights of rank {rank} are not {sum(sizes)}")
            self._parameters[rank] = [nn.Parameter(weight) for weight in _split(weights, sizes)]
            for parameter in self._parameters[rank]:
                states[parameter] = {STEP: torch.tensor(float(updates))} if slots.counts else {}
            for key, row in zip(slots.tensors, rows, strict=True):
                for parameter, value in zip(self._parameters[rank], _split(row, sizes), strict=True):
                    states[parameter][key] = value
        self._optimizer = self._make_optimizer(optimizer)
        self._optimizer.state.update(states)

    def _make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """Make the optimizer of all parameters, with weight decay on matrices only, as the Trainer has it."""
        kind, settings = find_optimizer(config, warmup_steps=0)
        settings.pop("weight_decay", None)
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for segment, parameter in self._with_segments():
            (matrices if len(segment.shape) >= 2 else vectors).append(parameter)
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        made: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **settings)
        return made

    def _with_segments(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """List all parameters, each with the segment that it is."""
        for rank, own in self.segments.items():
            yield from zip(own, self._parameters[rank], strict=True)

    def begin_step(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def add(self, rank: int, gradients: Sequence[torch.Tensor], weight: float) -> None:
        """Add to the gradients of the step that has begun.

        Args:
            rank: the rank of the island that has sent the gradients.
            gradients: finite float32 numbers of shape [elements], one tensor for each segment of the rank.
            weight: the factor by which the gradients are multiplied.
        """
        for parameter, gradient in zip(self._parameters[rank], gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(gradient, alpha=weight)

    def squares(self) -> list[float]:
        """Give a few numbers whose sum is exactly the sum of the squares of all gradients, as `exact_sum` does."""
        # Each element of the model once: tensor ranks hold some segments alike.
        once: dict[Segment, torch.Tensor | None] = {}
        for segment, parameter in self._with_segments():
            once.setdefault(segment, parameter.grad)
        return exact_sum(
            float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
            for gradient in once.values()
            if gradient is not None
        )

    @torch.no_grad()
    def step(self, scale: float, lr: float) -> None:
        """Step once with the gradients that were added, and forget them.

        Args:
            scale: the factor by which the gradients are multiplied, at most 1: it clips their norm.
            lr: learning rate of this step.
        """
        if scale < 1:
            for _, parameter in self._with_segments():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.updates += 1
        self.begin_step()

    def content(self, rank: int, *, with_slots: bool) -> bytes:
        """Give the float32 weights of a rank as bytes; `with_slots`: and the optimizer's tensors, row after row."""
        values = self._values[rank]
        given = values if with_slots else values[0]
        return given.numpy().tobytes()


def _read_rows(content: bytes, num_rows: int) -> torch.Tensor:
    """Give float32 values of shape [num_rows, elements]."""
    if not content:
        # `frombuffer` refuses a buffer without bytes.
        return torch.empty(num_rows, 0)
    # A bytearray, as its tensor can be written.
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(num_rows, -1)


def _split(row: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Give views of a row, of these sizes; without sizes there are none (torch would give the row itself)."""
    return row.split(sizes) if sizes else ()


def exact_sum(numbers: Iterable[float]) -> list[float]:
    """Give a few numbers whose sum is exactly the sum of all `numbers`.

    The first is the rounded sum, the second what that lacks, rounded, and so on. So the sums of several shards add up
    to the same number however the segments are shared out (Shewchuk 1997). Infinity alone is given where some number
    is not finite.
    """
    left = list(numbers)
    if not all(map(math.isfinite, left)):
        return [math.inf]
    found: list[float] = []
    while part := math.fsum(left):
        found.append(part)
        left.append(-part)
    return found
