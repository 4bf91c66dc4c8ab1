"""Values of tokens that a forward gives, on all ranks of a model replica."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.training import Training


def share_values(
    training: Training, batch: Batch, forward: Forward, function: Callable[[nn.Module, Batch], torch.Tensor]
) -> torch.Tensor:
    """Give what a function of (model, part of a batch) says of each token of a batch, on the CPU. A collective.

    Returns:
        Values of shape [rows, tokens], the same on all ranks of a model replica, which must have the same batch.
    """
    values: list[torch.Tensor] = []

    def note(model: nn.Module, part: Batch) -> torch.Tensor:
        values.append(function(model, part))
        return values[-1]

    forward(batch, note)
    known = torch.full(batch["labels"].shape, -torch.inf, device=training.args.device)
    if values:
        known = torch.cat(values)[: len(known)]
    strategy = training.strategy
    for axis in ("pipeline", "tensor"):
        if getattr(strategy.topology, axis) > 1:
            # Only a last stage has logits.
            dist.all_reduce(known, op=dist.ReduceOp.MAX, group=strategy.mesh.get_group(axis))
    return known.cpu()
