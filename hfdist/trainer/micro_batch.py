"""The loss of one micro batch, wherever an engine runs it: as the Trainer's class computes it, and as a sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from hfdist.strategies.base import Batch
from hfdist.trainer.loss import causal_lm_loss, num_target_tokens, sum_of_token_losses
from hfdist.trainer.trl_trainers import is_sft

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of a step.


def loss_of(trainer: Any, model: nn.Module, batch: Batch, num_items: torch.Tensor | None) -> torch.Tensor:
    """Compute the loss as the trainer's class does, divided by the targets of the global batch."""
    inputs = trainer._prepare_inputs(batch)
    with trainer.compute_loss_context_manager(), gathering(trainer.accelerator, trainer.engine.loss_group):
        return cast(torch.Tensor, trainer.compute_loss(model, inputs, num_items_in_batch=num_items))


def sum_of_losses(trainer: Any, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the sum of the token losses (float64) and the number of targets of a batch that is on its device."""
    is_own = trainer.compute_loss_func not in (None, causal_lm_loss)
    if not is_own and not is_sft(type(trainer)):
        return sum_of_token_losses(model, batch, accepts_loss_kwargs=trainer.model_accepts_loss_kwargs)
    count = num_target_tokens(batch["labels"])
    # Divided by one item, the class's own loss is a sum; and it notes its metrics on the way. A function of the user's
    # may be a mean that asks for no number: divided by those of this batch, it is a mean in any case.
    num_items = count.clamp(min=1) if is_own else torch.ones((), device=count.device)
    loss = loss_of(trainer, model, batch, num_items).double()
    if trainer.args.average_tokens_across_devices:
        loss = loss / trainer.accelerator.num_processes
    return (torch.where(count > 0, loss * count, 0.0) if is_own else loss), count


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
