"""Kahneman-Tversky optimization: answers that were liked or not, each by itself (arXiv 2402.01306).

    liked      desirable_weight   x (1 - sigmoid(beta x (r - kl)))     r: log-ratio of the answer to the reference's
    not liked  undesirable_weight x (1 - sigmoid(beta x (kl - r)))

kl estimates how far the model is from the reference: the mean log-ratio of answers to other prompts, at least 0. Here
it is that of a whole global batch, so that it is the same in every layout; each prompt is given the answer before it in
its sequence. The loss `apo_zero_unpaired` (arXiv 2408.06266) needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskLoss
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.objective import Documents, Objective, reduce_answers
from hfdist.trainer.training import Training
from hfdist.tune.reference import REFERENCE, ReferenceTable


class KahnemanTversky(Objective):
    """KTO. An item is an answer."""

    names = ("rewards/margins", "kl")

    def __init__(self, task: TaskConfig, table: ReferenceTable) -> None:
        super().__init__()
        self._task, self._table = task, table
        self._has_kl = task.loss is TaskLoss.kto
        self._kl = torch.zeros(())

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the answers."""
        documents = Documents.of(batch)
        return (documents.num_chosen_targets + documents.num_rejected_targets > 0).sum()

    def begin(self, training: Training) -> None:
        """Compute the reference's log-probabilities of all answers."""
        super().begin(training)
        self._table.compute(training, lambda batch: [batch, mismatched(batch)] if self._has_kl else [batch])

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities."""
        return self._table.prepare(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Estimate kl for the step."""
        if self._has_kl:
            engine, sums = self._training.engine, self._no_ratios()
            for batch in batches:
                other = self._table.prepare(mismatched(batch))
                engine.begin(other)
                engine.run_forwards(other, lambda model, part: self._add(sums, self._log_ratios(model, part)), hooks)
            self._take(sums)
        return super().begin_step(batches, hooks)

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Estimate kl for the whole held-out set."""
        if self._has_kl:
            sums = self._no_ratios()
            for batch in batches:
                for found in forward(self._table.prepare(mismatched(batch)), self._log_ratios):
                    sums += found
            self._take(sums)

    def _no_ratios(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._training.args.device)

    def _add(self, sums: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        sums += found
        return found

    def _log_ratios(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the sum of the log-ratios of a batch's answers, and their number."""
        batch = self._training.trainer._prepare_inputs(batch)

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_answer = documents.num_chosen_targets > 0
            ratios = torch.where(is_answer, log_probabilities - documents.sum(batch[REFERENCE]), 0)
            return torch.stack([ratios.double().sum(), is_answer.double().sum()])

        with self._training.trainer.compute_loss_context_manager():
            return reduce_answers(self._training, model, batch, reduce)

    def _take(self, sums: torch.Tensor) -> None:
        if dist.is_initialized():
            # Ranks of a tensor group add the same; that leaves a mean as it is.
            dist.all_reduce(sums)
        self._kl = (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the answers."""
        task, kl = self._task, self._kl.to(self._training.args.device)

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_liked, is_disliked = documents.num_chosen_targets > 0, documents.num_rejected_targets > 0
            is_answer = is_liked | is_disliked
            ratios = torch.where(is_answer, log_probabilities - documents.sum(batch[REFERENCE]), 0)
            sign = torch.where(is_liked, 1.0, -1.0)
            losses = 1 - torch.sigmoid(task.beta * sign * (ratios - kl if self._has_kl else ratios))
            weights = torch.where(is_liked, task.desirable_weight, task.undesirable_weight)
            self._note(is_answer, {"rewards/margins": task.beta * sign * ratios, "kl": kl.expand_as(ratios)})
            return torch.where(is_answer, weights * losses, 0).sum()

        return reduce_answers(self._training, model, batch, reduce)


def mismatched(batch: Batch) -> Batch:
    """Give each prompt the answer of the prompt before it in its row, and the first prompt the last answer.

    Rows keep their length, and targets are plain labels. A row with one answer has no target.
    """
    ids, labels, positions = (batch[name] for name in ("input_ids", "labels", "position_ids"))
    new = {"input_ids": ids.clone(), "labels": torch.full_like(labels, IGNORED), "position_ids": positions.clone()}
    for row in range(len(ids)):
        starts = [*torch.nonzero(positions[row] == 0)[:, 0].tolist(), positions.shape[1]]
        prompts, answers = [], []
        for start, stop in itertools.pairwise(starts):
            targets = torch.nonzero(labels[row, start:stop] != IGNORED)[:, 0]
            if len(targets):
                first = start + int(targets[0])
                prompts.append(ids[row, start:first])
                answers.append((ids[row, first:stop], labels[row, first:stop] != IGNORED))
        if len(prompts) < 2:
            continue
        place = 0
        for prompt, (answer, is_target) in zip(prompts, [answers[-1], *answers[:-1]], strict=True):
            stop, first = place + len(prompt) + len(answer), place + len(prompt)
            new["input_ids"][row, place:stop] = torch.cat([prompt, answer])
            new["labels"][row, first:stop] = torch.where(is_target, answer, IGNORED)
            new["position_ids"][row, place:stop] = torch.arange(stop - place)
            place = stop
        rest = positions.shape[1] - place
        new["position_ids"][row, place:] = torch.arange(rest)
    return new
