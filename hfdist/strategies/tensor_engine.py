"""The engine of tensor parallelism: all ranks of a tensor group read the same batch and compute its loss together.

Parameters that each rank has whole get one gradient from all of them, so that they stay the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from hfdist.checkpoint.piece import Piece, is_number
from hfdist.optim.probe import Reach
from hfdist.pipeline.gradients import local, sum_gradients
from hfdist.pipeline.stage_io import device_of
from hfdist.strategies.base import Batch, Engine, TrainerHooks
from hfdist.strategies.fsdp import FsdpEngine, broadcast
from hfdist.strategies.pieces_tensor import Cut
from hfdist.strategies.same_batch import check_same_batch


class TensorEngine(Engine):
    """The Trainer's own step on parts of matrices; replicas of the group average their gradients."""

    reduces_gradients = True
    optimizer_sees = Reach.element

    def __init__(self, model: nn.Module, mesh: DeviceMesh, cuts: dict[str, Cut], partial: frozenset[str]) -> None:
        super().__init__(model)
        self._begin(mesh, cuts, partial)

    def _begin(self, mesh: DeviceMesh, cuts: dict[str, Cut], partial: frozenset[str]) -> None:
        self._group = self.rows_group = mesh.get_group("tensor")
        self._rank = mesh.get_local_rank("tensor")
        self.loss_group = self._data_group = mesh.get_group("data")
        self._cuts = cuts
        self._partial = partial
        self._names: Any = WeakIdKeyDictionary()
        self._scaler: Any = None
        self._draws_alike = False

    def setup(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Keep the optimizer and the loss scale."""
        self._scaler, self._draws_alike = scaler, False
        return super().setup(prepared, optimizer, scaler)

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run forward and backward of a micro batch, which all ranks of the group were given.

        Raises:
            DataError: they were given different ones.
        """
        check_same_batch(batch, self._group, "tensor group")
        if not self._draws_alike:
            # Each rank draws the dropout masks of what it has whole; a resume sets the generators of each rank.
            _draw_alike(self._group)
            self._draws_alike = True
        return super().forward_backward(batch, num_items, hooks)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], hooks: TrainerHooks) -> list[Any]:
        """Run forwards together. The first rank of each group has values."""
        values = super().forward(batch, function, hooks)
        return values if self._rank == 0 else []

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """Add up the gradients of the ranks, then clip by the norm of the whole model; each parameter counts once."""
        self._reduce_gradients()
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer.optimizer)
        gradients = {n: local(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if name in self._cuts or self._rank == 0]
        squared = torch.nn.utils.get_total_norm(counted).to(device_of(self._group), torch.float32) ** 2
        for group in self._norm_groups():
            squared = _sum_in_order(squared, group)
        norm = squared.sqrt()
        if max_norm > 0:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients.values():
                gradient.mul_(factor.to(gradient.device))
        return norm

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose ranks hold different parts of the model."""
        return [self._group]

    def _reduce_gradients(self) -> None:
        parameters = dict(self.model.named_parameters())
        self._average_over_data(parameters.values())
        whole = {name: parameter for name, parameter in parameters.items() if name not in self._cuts}
        for name, parameter in whole.items():
            if parameter.grad is not None and name not in self._partial:
                # All ranks have it, the same but for rounding that a device may do in any order.
                local(parameter.grad).div_(self._group.size())
        sum_gradients(whole.values(), self._group)

    def _average_over_data(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._data_group.size())
        sum_gradients(parameters, self._data_group)

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Give the shape that a parameter of `model` has in the whole model."""
        if parameter not in self._names:
            # FSDP2 has one tensor for a shard, and another for what is gathered.
            self._names.update({own: name for name, own in self.model.named_parameters()})
        cut = self._cuts.get(self._names.get(parameter, ""))
        return super().whole_shape(parameter) if cut is None else cut.shape

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's parts, by names that say of which tensor rank they are."""
        return [
            (f"{name} of tensor rank {self._rank}" if name.partition("[")[0] in self._cuts else name, tensor)
            for name, tensor in super().whole_parameters()
        ]

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of each tensor."""
        for piece in super().pieces():
            yield from self.own_pieces(piece)

    def own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give pieces of the whole model, from one of this rank's model as if that were whole."""
        if piece.name in self._cuts and not is_number(piece.key):
            return self._cuts[piece.name].pieces(piece)
        return [piece]

    def after_load(self) -> None:
        """Let the next step draw alike in each group."""
        super().after_load()
        self._draws_alike = False


class TensorFsdpEngine(TensorEngine, FsdpEngine):
    """FSDP2 over the data ranks of what each tensor rank has."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, cuts: dict[str, Cut], partial: frozenset[str]) -> None:
        FsdpEngine.__init__(self, model)
        self._begin(mesh, cuts, partial)
        self._shard_group = mesh.get_group("shard")

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        return [self._shard_group, self._group]

    def _average_over_data(self, parameters: Iterable[nn.Parameter]) -> None:
        """FSDP2 has done it."""


def _sum_in_order(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group. A reduction may add up in another order in each replica, whose weights would then part."""
    every = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(every, value, group=group)
    return torch.stack(every).sum()


def _draw_alike(group: dist.ProcessGroup) -> None:
    """Set torch's generators of all ranks of a group to where those of its first rank stand. A collective."""
    device = device_of(group)
    state = torch.get_rng_state().to(device)
    broadcast(state, group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state().to(device)
        broadcast(state, group)
        torch.cuda.set_rng_state(state.cpu())
