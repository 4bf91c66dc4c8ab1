"""The loss of one micro batch, wherever an engine runs it: as its share of the global batch's, and as a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from hfdist.strategies.base import Batch

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of a step.


def loss_of(trainer: Any, model: nn.Module, batch: Batch, num_items: torch.Tensor | None) -> torch.Tensor:
    """Compute the loss as the trainer's class does, divided by the targets of the global batch."""
    inputs = trainer._prepare_inputs(batch)
    with trainer.compute_loss_context_manager(), gathering(trainer.accelerator, trainer.engine.loss_group):
        return cast(torch.Tensor, trainer.compute_loss(model, inputs, num_items_in_batch=num_items))


def weighted_mean(trainer: Any, mean: Callable[..., Any], batch: Batch, *, num_items_in_batch: torch.Tensor) -> Any:
    """Compute a loss that is a mean over its batch, and give it the weight of that batch in the global one.

    Args:
        trainer: whose loss is of this kind.
        mean: `Trainer.compute_loss` of the class after the mixin, for the trainer's model.
        batch: on its device.
        num_items_in_batch: weight of the global batch.

    Returns:
        What `mean` returns: the loss, or the loss and the outputs.
    """
    weight = trainer.convention.weight(batch).to(trainer.args.device)
    # A function of the user's may ask for a number that it does not divide by.
    own_number = None if trainer.compute_loss_func is None else weight.clamp(min=1)
    result = mean(trainer.convention.prepared(batch, weight), num_items_in_batch=own_number)
    share = weight / num_items_in_batch
    if own_number is None and trainer.args.average_tokens_across_devices:
        # Gradients are averaged over the processes, and the targets are counted over all.
        share = share * trainer.accelerator.num_processes
    return (result[0] * share, result[1]) if isinstance(result, tuple) else result * share


def sum_of_losses(trainer: Any, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the sum of the losses of all targets (float64), and their number, of a batch that is on its device."""
    weight = trainer.convention.weight(batch).to(trainer.args.device)
    # Divided by those of this batch, it is their mean.
    mean = loss_of(trainer, model, batch, weight.clamp(min=1)).double()
    if trainer.args.average_tokens_across_devices:
        mean = mean / trainer.accelerator.num_processes
    return torch.where(weight > 0, mean * weight, 0.0), weight


@contextmanager
def gathering(accelerator: Any, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Gather among the ranks that compute a loss in this moment: the others would never answer.

    Args:
        accelerator: whose `gather` and `gather_for_metrics` a class calls in its `compute_loss`.
        group: those ranks; None: all.
    """
    if group is None:
        yield
        return
    accelerator.gather = accelerator.gather_for_metrics = partial(_gather, group)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _gather(group: dist.ProcessGroup, values: Any) -> Any:
    def gather(value: torch.Tensor) -> torch.Tensor:
        own = value.detach().reshape(1) if value.ndim == 0 else value.detach().contiguous()
        if group.size() == 1:
            return own
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group=group)
        return torch.cat(found)

    return tree_map_only(torch.Tensor, gather, values)
