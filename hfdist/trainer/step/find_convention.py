"""The convention of a loss, by trying it: many models do not do what their signature says.

The loss of one row is computed with other labels and with other counts. Whether it changes tells what it counts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hfdist.errors import ConfigError
from hfdist.pipeline.stage_module import preserve_state
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.convention import Convention, ignored_like, is_target
from hfdist.trainer.step.loss import WeightedLoss
from hfdist.trainer.training import Training


def find_convention(weighted_loss: WeightedLoss, training: Training, batch: Batch, forward: Forward) -> Convention:
    """Find out what the loss of batches like this one counts. A collective, once in a run.

    Args:
        weighted_loss: the loss that is tried.
        training: the handle on the Trainer.
        batch: any batch of this rank.
        forward: runs the model in evaluation mode.

    Raises:
        ConfigError: in a pipeline, rows without labels.
    """
    trainer, names = training.trainer, weighted_loss.label_names
    plain = Convention(label_names=names, shifts=False, divides=False)
    labels = plain.labels(batch)
    if not training.engine.runs_whole_model:
        _check_pipeline(batch, labels)
    if labels is None:
        return plain
    name = next(name for name in names if batch.get(name) is labels)
    row = _first_row(batch, len(labels))
    # Three sets of labels for the same row: no target at all, a target everywhere, and later the first place alone.
    none = ignored_like(row[name])
    some = row[name].masked_fill(~is_target(row[name]), 0)
    is_of_tokens = name == "labels" and labels.ndim > 1 and not labels.is_floating_point()
    may_shift = is_of_tokens and labels.ndim == 2
    may_divide = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None

    def loss(labels: torch.Tensor, num_items: float = 1.0) -> torch.Tensor:
        number = torch.tensor(num_items, device=trainer.args.device) if may_divide else None
        with preserve_state(training.model):
            values = forward(row | {name: labels}, lambda model, part: weighted_loss.of(model, part, number))
        # Only the last stage of a pipeline has values; the other stages answer no to both questions.
        return values[0].float() if values else torch.zeros(())

    counts_first = divides = False
    with torch.compiler.set_stance("force_eager"):
        if may_shift:
            first = torch.cat([some[:, :1], none[:, 1:]], 1)
            # A loss that shifts labels never looks at the first one. A mean over no targets is NaN, and equals itself.
            counts_first = not torch.isclose(loss(none), loss(first), rtol=1e-6, atol=0.0, equal_nan=True)
        if may_divide:
            # A loss that divides by the number of items is half as large for twice the number.
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
    """Give the first row of a batch, if the first dimension of all its tensors is rows; otherwise the whole batch.

    Tensors of images have images there: those have more dimensions than tokens, or are matrices of floats.
    """
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    has_rows = all(0 < value.ndim <= 2 and len(value) == num_rows for value in tensors)
    has_rows = has_rows and not any(value.is_floating_point() and value.ndim == 2 for value in tensors)
    if not has_rows:
        return batch
    return {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _check_pipeline(batch: Batch, labels: torch.Tensor | None) -> None:
    """Refuse batches in a pipeline without labels that a row can lose."""
    if labels is None or labels is not batch.get("labels") or labels.is_floating_point():
        what = "a pipeline fills batches up with rows whose labels are ignored, and these rows have none that could be"
        where, found = "train_dataset, eval_dataset, data_collator", f"batches of {', '.join(batch)}"
        hint = "a data_collator that adds them, or a strategy without a pipeline"
        raise ConfigError(what, where=where, found=found, allowed="whole numbers as labels", hint=hint)
