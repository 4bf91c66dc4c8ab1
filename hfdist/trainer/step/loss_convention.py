"""What a loss counts is asked of the loss itself: signatures promise what many models do not do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hfdist.data import TokenStream
from hfdist.errors import ConfigError
from hfdist.pipeline.preserve_state import preserve_state
from hfdist.strategies.base import Batch, Forward
from hfdist.trainer.step.loss import Convention, ignored_like, is_target
from hfdist.trainer.step.micro_batch import loss_of


def ask(trainer: Any, forward: Forward, batch: Batch) -> Convention:
    """Try the loss, as the trainer computes it, on a row with other labels and other counts. A collective, once a run.

    Args:
        trainer: with an engine, and without a convention yet.
        forward: runs the model in evaluation mode.
        batch: any one of its batches.

    Raises:
        ConfigError: a pipeline, and labels of a kind that it cannot leave out in what fills a batch up.
    """
    names = names_of_labels(trainer)
    plain = Convention(label_names=names, shifts=False, divides=False)
    labels = plain.labels(batch)
    _check_pipeline(trainer, batch, labels)
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
        with preserve_state(trainer.model):
            values = forward(row | {name: labels}, lambda model, part: loss_of(trainer, model, part, number))
        # Without values on all but the last stage of a pipeline, which then answer no to both questions.
        return values[0].float() if values else torch.zeros(())

    counts_first = divides = False
    with torch.compiler.set_stance("force_eager"):
        if may_shift:
            first = torch.cat([some[:, :1], none[:, 1:]], 1)
            # The mean of no target is NaN.
            counts_first = not torch.isclose(loss(none), loss(first), rtol=1e-6, atol=0.0, equal_nan=True)
        if may_divide:
            divides = not torch.isclose(loss(some), loss(some, 2.0), rtol=1e-3, atol=0.0)
    if dist.is_initialized():
        answers = torch.tensor([counts_first, divides], dtype=torch.int32, device=trainer.args.device)
        dist.all_reduce(answers, op=dist.ReduceOp.MAX)
        counts_first, divides = map(bool, answers.tolist())
    shifts = may_shift and not counts_first
    # A stream gives each token as its own label; such a loss would train to copy it.
    moves = may_shift and counts_first and isinstance(trainer.train_dataset, TokenStream)
    return Convention(
        label_names=names, is_of_tokens=is_of_tokens, shifts=shifts, moves=moves, divides=divides and not moves
    )


def names_of_labels(trainer: Any) -> tuple[str, ...]:
    """Of what its batches may hold to compare with."""
    return tuple(dict.fromkeys(("labels", *trainer.label_names)))


def _first_row(batch: Batch, num_rows: int) -> Batch:
    """One row is enough, where all tensors have rows."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    has_rows = all(value.ndim > 0 and len(value) == num_rows for value in tensors)
    return {name: value[:1] if has_rows and isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _check_pipeline(trainer: Any, batch: Batch, labels: torch.Tensor | None) -> None:
    can_be_ignored = labels is not None and labels is batch.get("labels") and not labels.is_floating_point()
    if trainer.engine.runs_whole_model or can_be_ignored:
        return
    raise ConfigError(
        "a pipeline fills batches up with rows whose labels are ignored, and these rows have none that could be",
        where="train_dataset, eval_dataset, data_collator",
        found=f"batches of {', '.join(batch)}",
        allowed="whole numbers as labels",
        hint="a data_collator that adds them, or a strategy without a pipeline",
    )
