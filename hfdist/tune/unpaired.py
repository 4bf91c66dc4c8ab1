"""Kahneman-Tversky optimization: answers that were liked or not, each by itself (arXiv 2402.01306).

    liked      desirable_weight   x (1 - sigmoid(beta x (r - kl)))     r: log p(answer) - log p_ref(answer)
    not liked  undesirable_weight x (1 - sigmoid(beta x (kl - r)))

kl estimates how far the model is from the reference: the mean r of answers to other prompts, at least 0. Here it is the
mean over a whole global batch, so that it is the same in every layout; each prompt is given the answer before it in its
row. The loss `apo_zero_unpaired` (arXiv 2408.06266) needs no kl.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

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
    """The objective of KTO. An item is an answer.

    Args:
        task: `task.*` of the run.
        table: the reference's log-probabilities.
    """

    names = ("rewards/margins", "kl")

    def __init__(self, task: TaskConfig, table: ReferenceTable) -> None:
        super().__init__()
        self._task, self._table = task, table
        self._has_kl = task.loss is TaskLoss.kto
        self._kl = torch.zeros(())
        """The estimate of kl for the step, or for the held-out set."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the answers of a batch."""
        documents = Documents.of(batch)
        return (documents.num_chosen_targets + documents.num_rejected_targets > 0).sum()

    def begin(self, training: Training) -> None:
        """Compute the reference's log-probabilities of all answers. A collective."""
        super().begin(training)
        self._table.compute(training, lambda batch: [batch, mismatched(batch)] if self._has_kl else [batch])

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities to a batch."""
        return self._table.prepare(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Estimate kl for the step. A collective."""
        if self._has_kl:
            engine, sums = self._training.engine, self._no_ratios()

            def add_log_ratios(model: nn.Module, part: Batch) -> torch.Tensor:
                added = self._sum_log_ratios(model, part)
                sums.add_(added)
                return added

            for batch in batches:
                other = self._table.prepare(mismatched(batch))
                engine.begin(other)
                engine.run_forwards(other, add_log_ratios, hooks)
            self._set_kl(sums)
        return super().begin_step(batches, hooks)

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Estimate kl for the whole held-out set. A collective."""
        if self._has_kl:
            sums = self._no_ratios()
            for batch in batches:
                for added in forward(self._table.prepare(mismatched(batch)), self._sum_log_ratios):
                    sums += added
            self._set_kl(sums)

    def _no_ratios(self) -> torch.Tensor:
        """Give a sum of log-ratios and their number, both 0, to which `_sum_log_ratios` is added; shape [2]."""
        return torch.zeros(2, dtype=torch.float64, device=self._training.args.device)

    def _sum_log_ratios(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the sum of the log-ratios of a batch's answers, and their number; shape [2]."""
        # The Trainer's method puts a batch on the device, as its own loss does first.
        batch = self._training.trainer._prepare_inputs(batch)

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_answer = documents.num_chosen_targets > 0
            ratios = torch.where(is_answer, log_probabilities - documents.sum(batch[REFERENCE]), 0)
            return torch.stack([ratios.double().sum(), is_answer.double().sum()])

        with self._training.trainer.compute_loss_context_manager():
            return reduce_answers(self._training, model, batch, reduce)

    def _set_kl(self, sums: torch.Tensor) -> None:
        """Make kl of the sums of all ranks. A collective."""
        if dist.is_initialized():
            # Ranks of a tensor group add the same; that leaves a mean as it is.
            dist.all_reduce(sums)
        total, count = sums
        self._kl = (total / count.clamp(min=1)).clamp(min=0).float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's answers."""
        task, kl = self._task, self._kl.to(self._training.args.device)

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_liked, is_disliked = documents.num_chosen_targets > 0, documents.num_rejected_targets > 0
            is_answer = is_liked | is_disliked
            ratios = torch.where(is_answer, log_probabilities - documents.sum(batch[REFERENCE]), 0)
            sign = torch.where(is_liked, 1.0, -1.0)
            compared = ratios - kl if self._has_kl else ratios
            losses = 1 - torch.sigmoid(task.beta * sign * compared)
            weights = torch.where(is_liked, task.desirable_weight, task.undesirable_weight)
            self._note(is_answer, {"rewards/margins": task.beta * sign * ratios, "kl": kl.expand_as(ratios)})
            return torch.where(is_answer, weights * losses, 0).sum()

        return reduce_answers(self._training, model, batch, reduce)


def mismatched(batch: Batch) -> Batch:
    """Give each prompt the answer of the prompt before it in its row, and the first prompt the last answer.

        a row    prompt 1, answer 1 | prompt 2, answer 2 | prompt 3, answer 3
        becomes  prompt 1, answer 3 | prompt 2, answer 1 | prompt 3, answer 2

    Rows keep their length, and targets are plain labels. A row with one answer has no target.
    """
    ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    new = {"input_ids": ids.clone(), "labels": torch.full_like(labels, IGNORED), "position_ids": positions.clone()}
    for row in range(len(ids)):
        answered = _split_row(ids[row], labels[row] != IGNORED, positions[row])
        if len(answered) < 2:
            continue
        start = 0
        for own, before in zip(answered, [answered[-1], *answered[:-1]], strict=True):
            first = start + len(own.prompt)
            stop = first + len(before.answer)
            new["input_ids"][row, start:stop] = torch.cat([own.prompt, before.answer])
            new["labels"][row, first:stop] = torch.where(before.is_target, before.answer, IGNORED)
            new["position_ids"][row, start:stop] = torch.arange(stop - start)
            start = stop
        # What is left of the row is a document that fills it up.
        new["position_ids"][row, start:] = torch.arange(positions.shape[1] - start)
    return new


class _Answered(NamedTuple):
    """A prompt with its answer; all tensors have the shape [tokens]."""

    prompt: torch.Tensor
    answer: torch.Tensor
    """Tokens from the first target on."""
    is_target: torch.Tensor
    """Whether a token of the answer is a target."""


def _split_row(ids: torch.Tensor, is_target: torch.Tensor, positions: torch.Tensor) -> list[_Answered]:
    """Split each document of a row that has targets at its first target; arguments have the shape [tokens]."""
    starts = torch.nonzero(positions == 0)[:, 0].tolist()
    answered = []
    for start, stop in itertools.pairwise([*starts, len(ids)]):
        targets = torch.nonzero(is_target[start:stop])[:, 0]
        if len(targets):
            first = start + int(targets[0])
            answered.append(_Answered(ids[start:first], ids[first:stop], is_target[first:stop]))
    return answered
