"""What a loss counts, and the loss of one micro batch: micro batches of any sizes add up to the global loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from accelerate import Accelerator
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils._pytree import tree_map_only

from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.pipeline.stage_module import preserve_state
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.training import Training

NUM_ROWS = "hfdist_num_rows"
"""The key under which a batch without labels says how many of its rows count."""
_SHIFTED = "shift_labels"
"""The key of labels that a batch brings moved by one position already; a loss takes them in place of the others."""


def num_input_tokens(batch: object) -> int:
    """Count the tokens that a model reads; 0 for batches of another form, such as those of rewards."""
    # A dict is a Mapping too, but the check for dict is much faster.
    return batch["input_ids"].numel() if isinstance(batch, (dict, Mapping)) and "input_ids" in batch else 0


def is_target(labels: torch.Tensor) -> torch.Tensor:
    """Find which labels are targets: not NaN (floats), and not -100 (integers)."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def ignored_like(labels: torch.Tensor) -> torch.Tensor:
    """Make labels of the same shape that hold no target."""
    return torch.full_like(labels, torch.nan if labels.is_floating_point() else IGNORED)


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a loss counts, and how it divides by the count."""

    label_names: tuple[str, ...] = ("labels",)
    """The labels that a batch may hold; the first one found is counted."""
    is_of_tokens: bool = False
    """Whether each target is a token, one of many in a row."""
    shifts: bool
    """Whether label t + 1 is the target of position t; if so, the first label of a row is not a target."""
    moves: bool = False
    """Whether hfdist moves each label one position to the left, because the loss itself does not shift."""
    divides: bool
    """Whether the loss is a sum divided by `num_items_in_batch`; else it is a mean, and ignores that number."""

    def labels(self, batch: Mapping[str, object]) -> torch.Tensor | None:
        """Find the labels that are counted; None: the batch has none."""
        found = (batch[name] for name in self.label_names if name in batch)
        return next((labels for labels in found if isinstance(labels, torch.Tensor)), None)

    def weight(self, batch: Batch) -> torch.Tensor:
        """Count the targets; without labels, the rows."""
        labels = batch.get(_SHIFTED)
        if labels is None:
            labels = self.labels(batch)
            if labels is None:
                return batch[NUM_ROWS] if NUM_ROWS in batch else torch.tensor(find_batch_size(batch) or 1)
            if (self.shifts or self.moves) and labels.ndim > 1:
                labels = labels[:, 1:]
        return is_target(labels).count_nonzero()

    def prepared(self, batch: Mapping[str, object], weight: torch.Tensor) -> dict[str, object]:
        """Give a batch whose loss, a mean over targets, can be computed.

        A batch without targets gets arbitrary ones: their mean is finite, and is multiplied by 0.
        """
        changed = {}
        for name in (*self.label_names, _SHIFTED):
            labels = batch.get(name)
            if isinstance(labels, torch.Tensor):
                if self.moves and labels.ndim > 1 and name != _SHIFTED:
                    labels = torch.cat([labels[:, 1:], ignored_like(labels[:, :1])], 1)
                changed[name] = labels.masked_fill(weight == 0, 0)
        return {name: value for name, value in {**batch, **changed}.items() if name != NUM_ROWS}


def num_losses(trainer: transformers.Trainer) -> int:
    """Give the number by which the Trainer multiplies a loss: processes, but tensor ranks compute one loss together."""
    return int(trainer.accelerator.num_processes // trainer.get_tp_size())


class WeightedLoss:
    """The loss of one Trainer, for micro batches of any number of targets."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.convention: Convention | None = None
        """What the loss counts; None: not found out yet, or the class has a loss of its own."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that a batch may hold."""
        return tuple(dict.fromkeys(("labels", *self._training.trainer.label_names)))

    def of(self, model: nn.Module, batch: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Compute the loss as the trainer's class does, divided by the targets of the global batch."""
        trainer = self._training.trainer
        inputs = self._on_device(batch)
        group = self._training.engine.loss_group
        only = nullcontext() if group is None else gathering(trainer.accelerator, group)
        with trainer.compute_loss_context_manager(), only:
            return cast(torch.Tensor, trainer.compute_loss(model, inputs, num_items_in_batch=num_items))

    def _on_device(self, batch: Batch) -> Batch:
        """Move a batch as the class does. The original asks for the device anew at each tensor."""
        is_plain = type(batch) is dict and set(map(type, batch.values())) == {torch.Tensor}
        if not (is_plain and self._moves_as_original):
            return cast(Batch, self._training.trainer._prepare_inputs(batch))
        return {name: values.to(self._training.device) for name, values in batch.items()}

    @cached_property
    def _moves_as_original(self) -> bool:
        """Whether the class moves a batch as `transformers.Trainer` does; DeepSpeed asks for another type, too."""
        trainer = self._training.trainer
        methods = [getattr(trainer, name) for name in ("_prepare_inputs", "_prepare_input")]
        # Nothing was put in its place at run time.
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
        own_number = None if trainer.compute_loss_func is None else weight.clamp(min=1)
        result = mean(convention.prepared(batch, weight), num_items_in_batch=own_number)
        share = weight / num_items_in_batch
        if own_number is None and trainer.args.average_tokens_across_devices:
            # Gradients are averaged over the processes, but targets are counted over all of them.
            share = share * num_losses(trainer)
        return (result[0] * share, result[1]) if isinstance(result, tuple) else result * share

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

    def find_convention(self, batch: Batch, forward: Forward) -> Convention:
        """Try the loss on a row with other labels and other counts: many models do not do what their signature says.

        A collective, once in a run. `batch` is any one of this rank; `forward` runs the model in evaluation mode.
        """
        training, names = self._training, self.label_names
        trainer = training.trainer
        plain = Convention(label_names=names, shifts=False, divides=False)
        labels = plain.labels(batch)
        if not training.engine.runs_whole_model:
            _check_pipeline(batch, labels)
        if labels is None:
            return plain
        name = next(name for name in names if batch.get(name) is labels)
        row = _first_row(batch, len(labels))
        none = ignored_like(row[name])
        some = row[name].masked_fill(~is_target(row[name]), 0)
        is_of_tokens = name == "labels" and labels.ndim > 1 and not labels.is_floating_point()
        may_shift = is_of_tokens and labels.ndim == 2
        may_divide = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None

        def loss(labels: torch.Tensor, num_items: float = 1.0) -> torch.Tensor:
            number = torch.tensor(num_items, device=trainer.args.device) if may_divide else None
            with preserve_state(training.model):
                values = forward(row | {name: labels}, lambda model, part: self.of(model, part, number))
            # Only the last stage of a pipeline has values; the other stages answer no to both questions.
            return values[0].float() if values else torch.zeros(())

        counts_first = divides = False
        with torch.compiler.set_stance("force_eager"):
            if may_shift:
                first = torch.cat([some[:, :1], none[:, 1:]], 1)
                # A mean over no targets is NaN.
                counts_first = not torch.isclose(loss(none), loss(first), rtol=1e-6, atol=0.0, equal_nan=True)
            if may_divide:
                divides = not torch.isclose(loss(some), loss(some, 2.0), rtol=1e-3, atol=0.0)
        if dist.is_initialized():
            answers = torch.tensor([counts_first, divides], dtype=torch.int32, device=trainer.args.device)
            dist.all_reduce(answers, op=dist.ReduceOp.MAX)
            counts_first, divides = map(bool, answers.tolist())
        # A stream gives each token as its own label; a loss without a shift would train the model to copy.
        moves = may_shift and counts_first and training.stream is not None
        return Convention(
            label_names=names,
            is_of_tokens=is_of_tokens,
            shifts=may_shift and not counts_first,
            moves=moves,
            divides=divides and not moves,
        )


def _first_row(batch: Batch, num_rows: int) -> Batch:
    """Give the first row, if all tensors have rows; else the whole batch, as where some are of images.

    As many images as rows need not be one for each row: they have more axes than what is of tokens.
    """
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    has_rows = all(0 < value.ndim <= 2 and len(value) == num_rows for value in tensors)
    has_rows = has_rows and not any(value.is_floating_point() and value.ndim == 2 for value in tensors)
    return {name: value[:1] if has_rows and isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _check_pipeline(batch: Batch, labels: torch.Tensor | None) -> None:
    if labels is None or labels is not batch.get("labels") or labels.is_floating_point():
        what = "a pipeline fills batches up with rows whose labels are ignored, and these rows have none that could be"
        where, found = "train_dataset, eval_dataset, data_collator", f"batches of {', '.join(batch)}"
        hint = "a data_collator that adds them, or a strategy without a pipeline"
        raise ConfigError(what, where=where, found=found, allowed="whole numbers as labels", hint=hint)


@contextmanager
def gathering(accelerator: Accelerator, group: dist.ProcessGroup) -> Iterator[None]:
    """Gather only among the group's ranks, which compute a loss at the same time: other ranks would never answer."""
    accelerator.gather = accelerator.gather_for_metrics = partial(_gather, group)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _gather(group: dist.ProcessGroup, values: object) -> object:
    def gather(value: torch.Tensor) -> torch.Tensor:
        own = value.detach().reshape(1) if value.ndim == 0 else value.detach().contiguous()
        if group.size() == 1:
            return own
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group=group)
        return torch.cat(found)

    return tree_map_only(torch.Tensor, gather, values)
