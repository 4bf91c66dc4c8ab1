"""An objective: a loss that is a sum over items, such as pairs of answers, divided by their number in the global batch.

So it means the same in every layout, as the loss of next tokens does, which is a sum over targets. Sequences hold whole
documents, packed: where positions restart, a document begins. A document is a prompt and an answer.

    position_ids   0 1 2 3 0 1 2 | 0 1 2 3 4 5 6      two rows of 7 tokens
    of_token       0 0 0 0 1 1 1 | 2 2 2 2 2 2 2      three documents
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerState

from hfdist.config.batch import IGNORED
from hfdist.data.marks import split_labels
from hfdist.data.packing.sequence import text_positions
from hfdist.models.loss.deferred_rows import Reduce
from hfdist.models.loss.distillation import token_logits
from hfdist.models.loss.lazy_logits import reduce_token_losses
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.checkpointing.save_options import OuterState
from hfdist.trainer.step.convention import Convention, num_input_tokens
from hfdist.trainer.training import Training


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, numbered in the order of rows.

    What is given for each document has rows x tokens places: nobody need wait for the device to tell their number.
    """

    of_token: torch.Tensor
    """Number of each token's document; shape [rows, tokens]."""
    is_first: torch.Tensor
    """Whether a token begins a document; shape [rows, tokens]."""
    labels: torch.Tensor
    """Token ids of the targets, without marks of rejected answers; shape [rows, tokens]."""
    is_rejected: torch.Tensor
    """Whether a label is one of a rejected answer; shape [rows, tokens]."""

    @classmethod
    def of(cls, batch: Batch) -> Documents:
        """Find the documents of a batch by `position_ids` and `labels` of shape [rows, tokens].

        Positions may be [4, rows, tokens], as those of images, of which the first are of the text.
        """
        labels, is_rejected = split_labels(batch["labels"])
        is_first = text_positions(batch["position_ids"]) == 0
        of_token = (is_first.flatten().cumsum(0) - 1).view(is_first.shape)
        return cls(of_token, is_first, labels, is_rejected)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up values of tokens, of shape [rows, tokens], for each document; shape [rows x tokens]."""
        totals = values.new_zeros(values.numel())
        return totals.index_add(0, self.of_token.flatten(), values.flatten())

    @property
    def num_chosen_targets(self) -> torch.Tensor:
        """Number of targets in each document's answer, 0 if it is rejected; shape [rows x tokens]."""
        return self.sum(((self.labels != IGNORED) & ~self.is_rejected).float())

    @property
    def num_rejected_targets(self) -> torch.Tensor:
        """Number of targets in each document's answer, 0 unless it is rejected; shape [rows x tokens]."""
        return self.sum(((self.labels != IGNORED) & self.is_rejected).float())

    def log_probabilities(self, token_losses: torch.Tensor) -> torch.Tensor:
        """Give the log-probability of each document's answer, in nats; shape [rows x tokens].

        `token_losses` are those of all tokens but the first of each row, rows x (tokens - 1) in all.
        """
        rows, tokens = self.labels.shape
        of_tokens = -token_losses.view(rows, tokens - 1)
        with_first = nn.functional.pad(of_tokens, (1, 0))
        return self.sum(with_first)


@dataclass(frozen=True, kw_only=True)
class ItemConvention(Convention):
    """Weights a micro batch by the items of an objective."""

    count: Callable[[Batch], torch.Tensor]
    """Gives the number of items in a batch."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """Count the items of a batch."""
        return self.count(batch)


class Objective:
    """A loss that a Trainer computes in place of the model's own, and the figures that go with it."""

    names: tuple[str, ...] = ()
    """Names of the figures, which are means, in the order in which ranks add them up."""
    evaluates_itself = False
    """Whether `evaluate` gives what an evaluation averages, in place of losses of batches."""

    _training: Training

    def __init__(self) -> None:
        self._training_sums: torch.Tensor | None = None
        """Sum and number of items of each figure in training since they were last read; shape [figures, 2]."""
        self._evaluation_sums: torch.Tensor | None = None
        """The same of evaluations."""

    # ---- what each objective defines ----

    def count(self, batch: Batch) -> torch.Tensor:
        """Give the number of items in a batch, which may be on any device."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the sum of the items' losses; `model` is what the engine runs, perhaps one stage of a pipeline."""
        raise NotImplementedError

    def begin(self, training: Training) -> None:
        """Begin a training: the model has its first weights, and no checkpoint is read yet. A collective."""
        self._training = training

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callbacks that write the objective's files."""
        return []

    def outer_state(self) -> OuterState | None:
        """Give the objective's state in a checkpoint, once the training has begun; None: it has no state."""
        return None

    def write_files(self, folder: Path) -> None:
        """Write the objective's own files into an exported folder of the model, on rank 0."""

    def prepare(self, batch: Batch) -> Batch:
        """Give a batch, on the CPU, with all that the loss needs."""
        return batch

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Give the micro batches that a step trains on, from those that this data rank has read. A collective."""
        return [self.prepare(batch) for batch in batches]

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Begin an evaluation; `batches` are all held-out batches of this data rank. A collective."""

    def evaluate(self, forward: Forward) -> list[float]:
        """Give a measure of each held-out example that replaces its loss: the lower, the better.

        All ranks give the same. A collective.
        """
        raise NotImplementedError

    # ---- what all have ----

    @property
    def convention(self) -> Convention:
        """The weights of micro batches in a step's loss: numbers of items."""
        return ItemConvention(shifts=True, divides=True, count=self.count)

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens that the model reads of a batch as `begin_step` gives it."""
        return num_input_tokens(batch)

    def target_length(self, batch: Batch) -> int:
        """Give the tokens that a decoder reads of a row beside its `input_ids`; 0: there are none."""
        return 0

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Give the figures since the last call, and forget them. A collective."""
        if not self.names:
            return {}
        if trains:
            sums, self._training_sums = self._training_sums, None
        else:
            sums, self._evaluation_sums = self._evaluation_sums, None
        if sums is None:
            sums = self._zeros()
        if dist.is_initialized():
            dist.all_reduce(sums)
        # Ranks of a tensor group count the same; that leaves a mean as it is.
        return {name: total / count for name, (total, count) in zip(self.names, sums.tolist(), strict=True) if count}

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(len(self.names), 2, dtype=torch.float64, device=self._training.args.device)

    def measure(self, prefix: str) -> dict[str, float]:
        """Give the figures of an evaluation by their full names. A collective."""
        return {f"{prefix}_{name}": value for name, value in self.figures(trains=False).items()}

    def _note(self, is_item: torch.Tensor, figures: dict[str, torch.Tensor]) -> None:
        """Add figures of items to the sums; each has the shape of `is_item`, and counts where that is True."""
        # Asked of the model, as DeepSpeed's engine itself never says that it evaluates.
        if self._training.model.training:
            sums = self._training_sums = self._zeros() if self._training_sums is None else self._training_sums
        else:
            sums = self._evaluation_sums = self._zeros() if self._evaluation_sums is None else self._evaluation_sums
        count = is_item.sum()
        for name, values in figures.items():
            total = torch.where(is_item, values.detach(), 0).double().sum()
            sums[self.names.index(name)] += torch.stack([total, count]).to(sums)


class ObjectiveCallback(TrainerCallback):
    """A callback that is told of a step before its objective computes what it needs of all micro batches."""

    def on_objective(self, state: TrainerState) -> None:
        """Hear of a step before `Objective.begin_step`, and so before `on_step_begin`."""
        raise NotImplementedError


def reduce_answers(
    training: Training,
    model: nn.Module,
    batch: Batch,
    reduce: Callable[[Documents, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run the model on packed documents; give what `reduce` makes of them and of their answers' log-probabilities."""
    documents = Documents.of(batch)
    targets = {**batch, "labels": documents.labels}
    return reduce_tokens(
        training, model, targets, lambda losses: reduce(documents, documents.log_probabilities(losses))
    )


def reduce_tokens(
    training: Training, model: nn.Module, batch: Batch, reduce: Reduce, *, temperature: float = 1.0
) -> torch.Tensor:
    """Run the model, and give what `reduce` makes of the losses of all tokens but the first of each row.

    Where the training's head defers logits, they are never whole, in evaluations neither.
    """
    with nullcontext() if training.head is None else training.head.deferring(model):
        logits = token_logits(model, batch, temperature=temperature, of_images=training.image_names)
        return reduce_token_losses(logits, batch["labels"][:, 1:], reduce, ignore_index=IGNORED)
