"""Preferences (DPO and its kin): the model learns from pairs of a chosen and a rejected answer.

loss = mean of f(score of the chosen answer, score of the rejected one) over the pairs of the global batch
       + nll_weight x mean of -log p over the tokens of their chosen answers

f is the function of pair_losses.py that `task.loss` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.objective import Documents, Objective, reduce_answers
from hfdist.trainer.training import Training
from hfdist.tune.pair_losses import LOSSES
from hfdist.tune.reference import REFERENCE, ReferenceTable


def are_pairs(documents: Documents) -> torch.Tensor:
    """Whether a document is a chosen answer, and the next one the rejected answer of its pair; shape [documents]."""
    return (documents.num_chosen_targets > 0) & (next_of(documents.num_rejected_targets) > 0)


def next_of(values: torch.Tensor) -> torch.Tensor:
    """Give for each document the value of the next one, and 0 for the last; shape [documents]."""
    return nn.functional.pad(values[1:], (0, 1))


class Preferences(Objective):
    """DPO; or CPO, where batches have no log-probabilities of a reference. An item is a pair.

    Args:
        task: `task.*` of the run.
        table: the reference's log-probabilities; None: there is no reference, or a derived class computes them.
    """

    names: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def __init__(self, task: TaskConfig, table: ReferenceTable | None) -> None:
        super().__init__()
        self._task, self._table = task, table
        self._pair_loss = LOSSES[task.loss]
        self._pairs_per_token = torch.zeros(())
        """Number of pairs of the step, or of the held-out set, over the number of targets of their chosen answers."""
        if task.nll_weight:
            self.names = (*self.names, "nll")

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the pairs of a batch."""
        return are_pairs(Documents.of(batch)).sum()

    def begin(self, training: Training) -> None:
        """Compute the reference's log-probabilities of all pairs. A collective."""
        super().begin(training)
        if self._table is not None:
            self._table.compute(training, lambda batch: [batch])

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities to a batch, if there is a table of them."""
        return batch if self._table is None else self._table.prepare(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Count the tokens of the step's chosen answers."""
        return super().begin_step([*self._counted(batches)], hooks)

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Count the tokens of all held-out chosen answers."""
        if self._task.nll_weight:
            for _ in self._counted(batches):
                pass

    def _counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Give the batches as they are, one after another; after the last one, set `_pairs_per_token`. A collective.

        The Trainer divides all losses by the number of pairs. The loss of tokens is a mean over tokens, so it is
        multiplied by pairs over tokens first.
        """
        if not self._task.nll_weight:
            yield from batches
            return
        counts = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            documents = Documents.of(batch)
            is_pair = are_pairs(documents)
            counts += torch.stack([is_pair.sum(), documents.num_chosen_targets[is_pair].sum()]).to(counts)
            yield batch
        counts = counts.to(self._training.args.device)
        if dist.is_initialized():
            # Ranks of a model replica count the same; that leaves a ratio as it is.
            dist.all_reduce(counts)
        num_pairs, num_tokens = counts
        self._pairs_per_token = (num_pairs / num_tokens.clamp(min=1)).float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's pairs."""
        task = self._task

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_pair = are_pairs(documents)
            reference = documents.sum(batch[REFERENCE]) if REFERENCE in batch else 0
            scores = log_probabilities - reference
            means = scores / (documents.num_chosen_targets + documents.num_rejected_targets).clamp(min=1)
            chosen, rejected = _split_pairs(is_pair, means if self._pair_loss.takes_means else scores)
            losses = self._pair_loss.function(chosen, rejected, task)
            if REFERENCE in batch:
                # As TRL reports rewards: sums, whatever the loss takes, but without a reference what the loss takes.
                chosen, rejected = _split_pairs(is_pair, scores)
            margins = task.beta * chosen - task.beta * rejected
            figures = {
                "rewards/chosen": task.beta * chosen,
                "rewards/rejected": task.beta * rejected,
                "rewards/margins": margins,
                "rewards/accuracies": (margins > 0).float(),
            }
            if task.nll_weight:
                figures["nll"] = torch.where(is_pair, -log_probabilities, 0) * self._pairs_per_token
                losses = losses + task.nll_weight * figures["nll"]
            self._note(is_pair, figures)
            return torch.where(is_pair, losses, 0).sum()

        return reduce_answers(self._training, model, batch, reduce)


def _split_pairs(is_pair: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the values of chosen and of rejected answers, at the place of the chosen one; 0 where there is no pair."""
    return torch.where(is_pair, values, 0), torch.where(is_pair, next_of(values), 0)
