"""The loss of one micro batch, so that micro batches of any sizes add up to the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from accelerate import Accelerator
from torch import nn
from torch.utils._pytree import tree_map_only

from hfdist.strategies.engine import Batch
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.training import Training


def num_losses(trainer: transformers.Trainer) -> int:
    """Give the number of losses that all processes compute: one each, but the ranks of a tensor group one together.

    The Trainer multiplies a loss by it, since gradients are averaged over the processes.
    """
    return int(trainer.accelerator.num_processes // trainer.get_tp_size())


class WeightedLoss:
    """The loss of one Trainer, for micro batches of any number of targets."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.convention: Convention | None = None
        """Tells which targets of a batch the loss counts; None: not known yet, or the class has a loss of its own."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels that a batch may hold."""
        return tuple(dict.fromkeys(("labels", *self._training.trainer.label_names)))

    def of(self, model: nn.Module, batch: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Compute the loss as the trainer's class does, divided by the targets of the global batch."""
        trainer = self._training.trainer
        inputs = self._on_device(batch)
        group = self._training.engine.loss_group
        within_group = nullcontext() if group is None else gathering(trainer.accelerator, group)
        with trainer.compute_loss_context_manager(), within_group:
            return cast(torch.Tensor, trainer.compute_loss(model, inputs, num_items_in_batch=num_items))

    def _on_device(self, batch: Batch) -> Batch:
        """Move a batch to the device as the class does; the original's way is slow, as it looks for the device anew."""
        is_plain = type(batch) is dict and set(map(type, batch.values())) == {torch.Tensor}
        if not (is_plain and self._moves_as_original):
            return cast(Batch, self._training.trainer._prepare_inputs(batch))
        return {name: values.to(self._training.device) for name, values in batch.items()}

    @cached_property
    def _moves_as_original(self) -> bool:
        """Whether the class moves a batch as `transformers.Trainer` does; DeepSpeed asks for another type, too."""
        trainer = self._training.trainer
        methods = [getattr(trainer, name) for name in ("_prepare_inputs", "_prepare_input")]
        # A method that a program has put in the place of the original comes from another module.
        is_original = all(getattr(one, "__globals__", None) is vars(transformers.trainer) for one in methods)
        return is_original and not trainer.is_deepspeed_enabled

    def of_micro_batch(self, model: nn.Module, batch: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Compute what a micro batch adds to the loss of its step; the rest of `Trainer.training_step`."""
        trainer = self._training.trainer
        loss = self.of(model, batch, num_items)
        if self._training.num_gpus > 1:
            loss = loss.mean()
        is_divided = trainer.loss_is_scaled_for_ga
        if is_divided is None:
            counts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_divided = counts or trainer.compute_loss_func is not None
        return loss if is_divided else loss / trainer.current_gradient_accumulation_steps

    def of_mean(self, mean: Callable[..., Any], batch: Batch, *, num_items_in_batch: torch.Tensor) -> object:
        """Compute a loss that is a mean over its batch, and multiply it by the batch's share of all targets.

        `mean` is `Trainer.compute_loss` of the class after the mixin: it gives the loss, or the loss and the outputs.
        """
        trainer, convention = self._training.trainer, self.convention
        assert convention is not None
        weight = convention.weight(batch).to(self._training.device)
        # The user's `compute_loss_func` may ask for a number, even if it does not divide by it.
        number_here = None if trainer.compute_loss_func is None else weight.clamp(min=1)
        result = mean(convention.prepared(batch, weight), num_items_in_batch=number_here)
        share = weight / num_items_in_batch
        if number_here is None and trainer.args.average_tokens_across_devices:
            # Gradients are averaged over the processes, but targets are counted over all of them.
            share = share * num_losses(trainer)
        if isinstance(result, tuple):
            loss, outputs = result
            return loss * share, outputs
        return result * share

    def summed(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the sum of the losses of all targets (float64), and their number; the batch must be on its device."""
        trainer, convention = self._training.trainer, self.convention
        assert convention is not None
        weight = convention.weight(batch).to(self._training.device)
        # Divided by the targets of this batch, the loss is their mean.
        mean = self.of(model, batch, weight.clamp(min=1)).double()
        if trainer.args.average_tokens_across_devices:
            mean = mean / num_losses(trainer)
        return torch.where(weight > 0, mean * weight, 0.0), weight


@contextmanager
def gathering(accelerator: Accelerator, group: dist.ProcessGroup) -> Iterator[None]:
    """Gather only among the group's ranks, which compute a loss at the same time: other ranks would never answer."""
    accelerator.gather = accelerator.gather_for_metrics = partial(_gather, group)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _gather(group: dist.ProcessGroup, values: object) -> object:
    """Do what `Accelerator.gather` does within a group: join the ranks' tensors along their first dimension."""

    def gather(value: torch.Tensor) -> torch.Tensor:
        here = value.detach().reshape(1) if value.ndim == 0 else value.detach().contiguous()
        if group.size() == 1:
            return here
        of_ranks = [torch.empty_like(here) for _ in range(group.size())]
        dist.all_gather(of_ranks, here, group=group)
        return torch.cat(of_ranks)

    return tree_map_only(torch.Tensor, gather, values)
