"""Tensor parallelism: the ranks of a group share the matrices of each layer, and FSDP2 may shard what each has."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.strategy import Sharding
from hfdist.strategies.base import Engine, ShardFractions, Strategy
from hfdist.strategies.fsdp import broadcast, shard_model
from hfdist.strategies.tensor_check import check_plan
from hfdist.strategies.tensor_cut import cut_model, make_plan
from hfdist.strategies.tensor_engine import TensorEngine, TensorFsdpEngine


class TensorStrategy(Strategy):
    """`strategy.tensor=N`, by transformers' plan for the type of the model; alone or under FSDP2."""

    def partition(self, model: nn.Module) -> None:
        """Check that the model can be cut; it stays whole until `build`.

        Raises:
            ConfigError: it cannot.
        """
        make_plan(cast(PreTrainedModel, model), self.topology.tensor)

    def build(self, model: nn.Module) -> Engine:
        """Try the plan on a small model of the class, then cut the model in place. A collective.

        Raises:
            ConfigError: the model cannot be cut, or does not train so as it does on one process.
        """
        plan, mesh = make_plan(cast(PreTrainedModel, model), self.topology.tensor), self.mesh
        check_plan(cast(PreTrainedModel, model), mesh)
        whole = sum(parameter.numel() for parameter in model.parameters())
        _start_from_rank_0(model, mesh.device_type)
        cuts = cut_model(model, mesh["tensor"], plan)
        share = sum(parameter.numel() for parameter in model.parameters()) / whole
        is_sharded = self.config.sharding is Sharding.fsdp2 and self.topology.data > 1
        share /= self.topology.shard if is_sharded else 1
        self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)
        if not is_sharded:
            return TensorEngine(model, mesh, cuts, plan.partial)
        shard_model(model, mesh, self.config)
        return TensorFsdpEngine(model, mesh, cuts, plan.partial)


@torch.no_grad()
def _start_from_rank_0(model: nn.Module, device_type: str) -> None:
    """Start from rank 0's weights, as DDP does: ranks may have drawn their own. One tensor at a time is on a device."""
    world = dist.group.WORLD
    assert world is not None
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.to(device_type).contiguous()
        broadcast(sent, world)
        tensor.data.copy_(sent)
