"""FSDP2: parameters, gradients and optimizer state sharded over the data ranks, and gathered block by block.

With `strategy.replicate` (HSDP) each group of ranks holds all of the state once; gradients are averaged over groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import device_of
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Offload, StrategyConfig
from hfdist.errors import ConfigError, first_line
from hfdist.models.probing import kind_of_name
from hfdist.optim.check import describe
from hfdist.optim.probe import Reach
from hfdist.optim.trial_step import state_after_step
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Engine
from hfdist.strategies.fsdp_units import shard_model
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.held import have_room
from hfdist.strategies.parameter_shards import TENSOR
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.step_memory import Buffers, MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import Axes, Phase, Sent
from hfdist.topology import Topology

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from hfdist.strategies.context import ContextParallel


class FsdpStrategy(Strategy):
    """`strategy.sharding=fsdp2`, by torch's `fully_shard`."""

    counts_all_experts = True

    def __init__(self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig) -> None:
        super().__init__(topology, batch, strategy)
        if strategy.offload is Offload.cpu and topology.data * topology.context == 1:
            what = "FSDP2 offloads shards, and one data rank has none"
            hint = "strategy=zero3_offload, which works on one device, or more processes"
            raise ConfigError(what, where="strategy.offload", found="cpu", allowed="none", hint=hint)
        share = 1.0 / (topology.shard * topology.context)
        self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)

    def training_arguments(self) -> dict[str, object]:
        """Give the base class's arguments; offload from a GPU needs a CPU backend, too, for norms of gradients."""
        has_two = self.config.offload is Offload.cpu and torch.cuda.is_available()
        return super().training_arguments() | ({"ddp_backend": "cpu:gloo,cuda:nccl"} if has_two else {})

    def build(self, model: nn.Module) -> Engine:
        """Shard the model in place.

        Raises:
            ConfigError: a parameter that FSDP2 cannot shard, or a model whose ranks cannot share sequences, or its
                parameters.
        """
        if self.topology.world_size == 1:
            return Engine(model)
        self._partition_once(model)
        context = self._shard_sequences(model)
        parts = self._shard_parameters(model)
        if self.topology.data * self.topology.context == 1:
            engine = Engine(model, context, parts)
        else:
            unused = shard_model(model, self.mesh, self.config, parts)
            frees = self.config.frees_after_forward
            engine = FsdpEngine(model, self.mesh, context, parts, frees_after_forward=frees, unused=unused)
        self._count_fractions(engine)
        return engine

    def _state_traffic(self, axes: Axes) -> Iterable[Sent]:
        # The root is gathered once; blocks again for the backward, unless they are kept.
        again = axes.sizes.blocks / axes.sizes.parameters if self.config.frees_after_forward else 0.0
        return axes.shard_weights(again=again, microbatches=self.batch.num_microbatches, ends=Phase.backward)

    def _whole_traffic(self, axes: Axes) -> Iterable[Sent]:
        return axes.gather_shards()

    @classmethod
    def _state(cls, sizes: RankSizes) -> MemoryUse:
        use = sizes.state()
        return use if sizes.layout.offload is Offload.none else replace(use, weights=0.0)

    @classmethod
    def _buffers(cls, sizes: RankSizes) -> Buffers:
        weight, gradient, largest, ends = sizes.weight_bytes, sizes.gradient_bytes, sizes.largest_block, sizes.ends
        return Buffers(
            # One block that computes, the next one, and what is outside of blocks, whose gradients come last.
            gathered=(2 * largest + ends) * weight,
            reduced=largest * gradient,
            after_blocks=ends * (weight + 2 * gradient),
        )


class ShardedEngine(Engine):
    """An engine of which each rank has rows of each parameter, as DTensors. Derived classes call `_take_root`."""

    reduces_gradients = True
    optimizer_sees = Reach.parameter
    steps_other_tensors = True
    # FSDP2 has sharded what is whole on the ranks of an expert group.
    axes_of_parts = (TENSOR,)

    def _take_root(self, root: nn.Module, mesh: DeviceMesh, frees_after_forward: bool, unused: frozenset[str]) -> None:
        """Take the module that FSDP knows as its root; the blocks in it are freed after their forwards, or are not.

        `unused` is what `shard_by_blocks` gave.
        """
        self._root = cast(FSDPModule, root)
        self._unused = unused
        self._frees_after_forward = frees_after_forward
        self._is_gathered = False
        """Whether weights stay whole between forwards: see `gathered`."""
        self._sharded_group = mesh.get_group("sharded")
        has_parts = self._parts is not None and self._parts.groups.tensor is not None
        self._group_of_parts = mesh.get_group("sharded_parts") if has_parts else None
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        """Free what is gathered: what is gathered of a parameter hides its shard from all that look at the model."""
        for unit in () if self._is_gathered else self._units:
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make weights whole for a while, gathered unit by unit, in the type that is trained."""
        num_bytes = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        if not have_room(num_bytes, device_of(self._sharded_group)):
            yield
            return
        self._is_gathered = True
        self._free_after_forward(False)
        try:
            for unit in self._units:
                unit.unshard()
            yield
        finally:
            self._is_gathered = False
            self._free_after_forward(self._frees_after_forward)
            self._reshard()

    def _free_after_forward(self, frees: bool) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(frees and unit is not self._root, recurse=False)

    def _drop_unused_gradients(self) -> None:
        """Take zeros away that FSDP made where no rank has a gradient: the optimizer would decay such a parameter.

        A collective where the model has any.
        """
        suspects = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and kind_of_name(name) in self._unused
        ]
        if not suspects:
            return
        group = self._group_of_parts or self._sharded_group
        counts = [local_tensor(cast(torch.Tensor, parameter.grad)).count_nonzero() for parameter in suspects]
        used = torch.stack(counts).to(device_of(group))
        dist.all_reduce(used, group=group)
        for parameter, count in zip(suspects, used.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        return [self._sharded_group, *super()._norm_groups()]

    def setup(
        self, prepared: nn.Module, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None
    ) -> AcceleratedOptimizer:
        """Keep the optimizer, if it can step DTensors, or needs whole parameters.

        Raises:
            ConfigError: it can step neither, or not with a loss scale.
        """
        inner = optimizer.optimizer
        # Groups are compared by identity: `==` of groups with equally many tensors raises.
        of_wholes = set(map(id, self._groups_of_wholes(inner)))
        for group in (group for group in inner.param_groups if id(group) not in of_wholes):
            smallest = min(group["params"], key=torch.Tensor.numel, default=None)
            try:
                if smallest is not None:
                    state_after_step(inner, group, smallest.detach())
            except Exception as error:  # of the user's class: any
                raise ConfigError(
                    "this optimizer cannot step sharded parameters (DTensors)",
                    where="optimizer.name, optim or optimizers",
                    found=f"{describe(inner)}: {first_line(error)}",
                    hint="strategy=zero3, which gives it plain tensors, or adamw",
                ) from error
        return super().setup(prepared, optimizer, scaler)

    def _holders(self, name: str) -> dist.ProcessGroup | None:
        is_divided = self._parts is not None and self._parts.axis(name) == TENSOR
        return self._group_of_parts if is_divided else self._sharded_group

    def _held_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's rows, by name and first element: each group of ranks holds the same."""
        self._reshard()
        return [
            (f"{name}[{self._start(p)}:]", p.to_local())
            for name, p in self.model.named_parameters()
            if isinstance(p, DTensor)
        ]

    def _held_pieces(self) -> Iterable[Piece]:
        self._reshard()
        return super()._held_pieces()

    def weights(self) -> Iterable[Piece]:
        """Give the weights as pieces, once they are shards again."""
        self._reshard()
        return super().weights()

    def _own_pieces(self, piece: Piece) -> Iterable[Piece]:
        view = piece.view
        own = replace(piece, start=self._start(view), view=view.to_local()) if isinstance(view, DTensor) else piece
        return super()._own_pieces(own)

    def after_load(self) -> None:
        """Let the next forward gather what was read."""
        super().after_load()
        self._reshard()

    def _start(self, tensor: DTensor) -> int:
        """Give where this rank's rows begin: torch.chunk gives each equally many, the last ones fewer or none."""
        mesh, num_rows = tensor.device_mesh, tensor.shape[0]
        rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        return min(rank * -(-num_rows // size), num_rows) * math.prod(tensor.shape[1:])


class FsdpEngine(ShardedEngine):
    """The step of the base class over DTensors; FSDP's hooks gather parameters, and reduce gradients to shards.

    Every forward is a collective, in evaluation too.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        context: ContextParallel | None,
        parts: ModelParts | None,
        *,
        frees_after_forward: bool,
        unused: frozenset[str],
    ) -> None:
        super().__init__(model, context, parts)
        self._take_root(model, mesh, frees_after_forward, unused)
        # Hooks run in order: this one after FSDP's own.
        model.register_forward_hook(self._after_forward)

    def _after_forward(self, *_: object) -> None:
        # A backward would do it, and none follows.
        if not torch.is_grad_enabled():
            self._reshard()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the all-reduce over replicas to the last micro batch; shards are reduced at each."""
        self._root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._root.set_requires_all_reduce(True)

    def _average_gradients(self, parts: ModelParts) -> None:
        """FSDP2 has done it."""

    def clip_grad_norm(self, max_norm: float) -> object:
        """Clip the norm over all ranks, in place, and give it. Parameters that no rank has used get no gradient."""
        self._drop_unused_gradients()
        return super().clip_grad_norm(max_norm)
