"""FSDP2: parameters, gradients and optimizer state sharded over the data ranks, and gathered block by block.

With `strategy.replicate` (HSDP) each group of ranks holds all of the state once; gradients are averaged over groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import Piece
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Offload, StrategyConfig
from hfdist.errors import ConfigError
from hfdist.models.blocks import calls_blocks, find_block_parts
from hfdist.optim.probe import Reach
from hfdist.strategies.base import Batch, Engine, ShardFractions, Strategy, TrainerHooks, build_mesh, check_no_scalars
from hfdist.topology import Topology


class FsdpStrategy(Strategy):
    """`strategy.sharding=fsdp2`, by torch's `fully_shard`."""

    def __init__(self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig) -> None:
        super().__init__(topology, batch)
        self.config = strategy
        share = 1.0 / topology.shard
        self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)

    def build(self, model: nn.Module) -> Engine:
        """Shard the model in place.

        Raises:
            ConfigError: a parameter that FSDP2 cannot shard.
        """
        if self.topology.world_size == 1:
            return Engine(model)
        check_no_scalars(model, "FSDP2")
        mesh = build_mesh(self.topology)
        mesh = mesh["replicate", "shard"] if self.topology.replicate > 1 else mesh["shard"]
        offload = OffloadPolicy()
        if self.config.offload is Offload.cpu:
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        units = list(_list_units(cast(PreTrainedModel, model)))
        for unit in units:
            _broadcast(unit, mesh.device_type)
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.config.reshard, offload_policy=offload)
        if self.config.prefetch > 0:
            _prefetch(cast(list[FSDPModule], units), self.config.prefetch)
        _broadcast(model, mesh.device_type)
        # The backward begins with what the forward ends with.
        fully_shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
        return FsdpEngine(model, self.topology)


def _list_units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """List what is gathered besides the root, which has the rest: blocks that share no parameter with others."""
    try:
        blocks = [part for parts in find_block_parts(model) for part in parts]
    except (AttributeError, ConfigError):  # no config, or no blocks
        return
    if not calls_blocks(model):
        return
    holders = Counter(id(parameter) for block in blocks for parameter in set(block.parameters()))
    for block in blocks:
        if all(holders[id(parameter)] == 1 for parameter in block.parameters()):
            yield block


def _broadcast(unit: nn.Module, device_type: str) -> None:
    """Start from rank 0's weights, as DDP does: ranks may have drawn their own. One unit at a time is on the device."""
    unit.to(device_type)
    for tensor in (*unit.parameters(), *unit.buffers()):
        if not isinstance(tensor, DTensor):
            # Not each backend knows truth values.
            dist.broadcast(tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor.detach(), 0)


def _prefetch(units: list[FSDPModule], count: int) -> None:
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, place - count) : place][::-1])


class FsdpEngine(Engine):
    """The Trainer's own step over DTensors; FSDP's hooks gather parameters, and reduce gradients to shards."""

    reduces_gradients = True
    optimizer_sees = Reach.element

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        super().__init__(model)
        self._topology = topology
        self._root = cast(FSDPModule, model)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the all-reduce over replicas to the last micro batch; shards are reduced at each."""
        self._root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._root.set_requires_all_reduce(True)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], hooks: TrainerHooks) -> list[Any]:
        """As without sharding. All ranks call it equally often: parameters are gathered."""
        try:
            return super().forward(batch, function, hooks)
        finally:
            # Where no backward follows, some stay whole, and what looks at the model would not see the shards.
            for unit in self._units:
                unit.reshard()

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """As the Trainer does; the norm is that of the whole model."""
        norm = default()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """None: all are sharded."""
        return [(name, p) for name, p in self.model.named_parameters() if not isinstance(p, DTensor)]

    def pieces(self) -> Iterator[Piece]:
        """This rank's rows of each tensor."""
        for piece in super().pieces():
            yield self._rows(piece, piece.view) if isinstance(piece.view, DTensor) else piece

    def _rows(self, piece: Piece, tensor: DTensor) -> Piece:
        # As torch.chunk divides them: equally many for each rank, the last ones with fewer or none.
        num_rows, rank = tensor.shape[0], self._topology.data_rank % self._topology.shard
        first = min(rank * -(-num_rows // self._topology.shard), num_rows)
        return replace(piece, start=first * math.prod(tensor.shape[1:]), view=tensor.to_local())
