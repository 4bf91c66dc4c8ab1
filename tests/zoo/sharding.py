"""Shard a tiny model with FSDP2 over the ranks of a group, and compare an accumulated step with the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hfdist.config.batch import plan_batch
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.errors import ConfigError
from hfdist.strategies.fsdp import FsdpStrategy
from hfdist.topology import Degrees, Topology
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import TOLERANCE, compare_gradients, compare_losses, run_whole, take_gradients

NUM_MICROBATCHES = 2
"""Of a rank."""


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What came of sharding one model."""

    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    worst_parameter: str = ""
    reason: str = ""
    """Why the model was refused."""
    gradient_bound: float = TOLERANCE
    """Up to where gradients are called exact."""

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, or `wrong`."""
        if self.reason:
            return "refused"
        is_exact = self.loss_difference <= TOLERANCE and self.gradient_difference <= self.gradient_bound
        return "exact" if is_exact else "wrong"


def shard_types(model_types: Iterable[str]) -> dict[str, Sharded]:
    """Try types one after the other. All ranks of the group call it."""
    torch.set_num_threads(1)
    return {model_type: shard_type(model_type) for model_type in model_types}


def shard_type(model_type: str) -> Sharded:
    """Run two micro batches on each rank, and all of them on the whole model."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = tiny_model(model_type)
    batches = [tiny_batch(model, seed=seed) for seed in range(NUM_MICROBATCHES * size)]
    whole = run_whole(model, batches)
    topology = Topology.of(Degrees(), world_size=size, rank=rank)
    plan = plan_batch(
        global_batch_size=len(batches), micro_batch_size=1, data_size=size, sequence_length=16, lanes=len(batches)
    )
    try:
        engine = FsdpStrategy(topology, plan, StrategyConfig(sharding=Sharding.fsdp2)).build(model)
    except ConfigError as error:
        return Sharded(reason=error.what)
    own = slice(rank * NUM_MICROBATCHES, (rank + 1) * NUM_MICROBATCHES)
    *first, last = batches[own]
    with engine.accumulating():
        losses = [_train(model, batch) for batch in first]
    losses.append(_train(model, last))
    gradients = {
        # FSDP averages over the ranks, and the whole model has added up.
        name: gradient.full_tensor() * size if isinstance(gradient, DTensor) else gradient
        for name, gradient in take_gradients(model).items()
    }
    # What no loss depends on has a gradient of zeros then.
    for name, gradient in gradients.items():
        if whole.gradients[name] is None and gradient is not None and not gradient.any():
            gradients[name] = None
    gradient_difference, worst_parameter = compare_gradients(gradients, whole.gradients)
    return Sharded(
        loss_difference=compare_losses(losses, whole.losses[own]),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
    )


def _train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    loss.backward()
    return loss.item()
