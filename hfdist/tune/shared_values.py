"""Values of tokens that a forward gives on some ranks of a model replica, shared with all of its ranks.

    pipeline stages   0: -inf   1: -inf   2: the values      only a last stage has logits
    the maximum       each stage has the values

Tensor ranks of a last stage have the same values, so that their maximum changes nothing.
"""

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
    """Compute a value for each token of a batch, on all ranks of a model replica. A collective.

    Args:
        training: a training.
        batch: a batch, the same on all ranks of a model replica.
        forward: runs forwards in the layout.
        function: gives the values of a part of the batch by the model; shape [rows of the part, tokens].

    Returns:
        Values on the CPU, the same on all ranks of a model replica; shape [rows, tokens].
    """
    parts: list[torch.Tensor] = []

    def note(model: nn.Module, part: Batch) -> torch.Tensor:
        values = function(model, part)
        parts.append(values)
        return values

    forward(batch, note)
    shared = torch.full(batch["labels"].shape, -torch.inf, device=training.args.device)
    if parts:
        # Rows that fill up the micro batches of a pipeline come last.
        shared = torch.cat(parts)[: len(shared)]
    strategy = training.strategy
    for axis, num_ranks in (("pipeline", strategy.topology.pipeline), ("tensor", strategy.topology.tensor)):
        if num_ranks > 1:
            # Only now is there a mesh for sure: one process has none.
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=strategy.mesh.get_group(axis))
    return shared.cpu()
