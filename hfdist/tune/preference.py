"""Direct preference optimization (DPO): a loss of pairs of a chosen and a rejected answer, relative to the reference.

loss = f(beta x ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))), by the task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from hfdist.config.task import PreferenceLoss, TaskConfig
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.objective import Documents, Objective, reduce_answers
from hfdist.trainer.training import Training
from hfdist.tune.reference import REFERENCE, ReferenceTable


class Pairs(NamedTuple):
    """Pairs by the number of their chosen document; the rejected one is the next document of the row."""

    is_pair: torch.Tensor
    chosen: torch.Tensor
    """Log-ratio of the chosen answer to the reference; 0 where there is no pair."""
    rejected: torch.Tensor
    """Log-ratio of the rejected answer to the reference; 0 where there is no pair."""
    num_chosen: torch.Tensor
    """Number of target tokens of the chosen answer."""
    num_rejected: torch.Tensor
    """Number of target tokens of the rejected answer."""


def are_pairs(documents: Documents) -> torch.Tensor:
    """Whether a document is a chosen answer, and the next one the rejected answer of its pair; shape [documents]."""
    return (documents.num_chosen_targets > 0) & (next_of(documents.num_rejected_targets) > 0)


def next_of(values: torch.Tensor) -> torch.Tensor:
    """Give for each document the value of the next one."""
    return nn.functional.pad(values[1:], (0, 1))


# Sources, on arXiv: sigmoid 2305.18290; robust 2403.00409; hinge 2305.10425; ipo 2310.12036, over mean token
# log-ratios; apo_zero, apo_down 2408.06266.
_Loss = Callable[[Pairs, TaskConfig], torch.Tensor]


def _sigmoid(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    return -logsigmoid(task.beta * (pairs.chosen - pairs.rejected))


def _robust(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    margin, noise = task.beta * (pairs.chosen - pairs.rejected), task.label_smoothing
    return (noise * logsigmoid(-margin) - (1 - noise) * logsigmoid(margin)) / (1 - 2 * noise)


def _hinge(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    return torch.relu(1 - task.beta * (pairs.chosen - pairs.rejected))


def _ipo(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    chosen, rejected = pairs.chosen / pairs.num_chosen.clamp(min=1), pairs.rejected / pairs.num_rejected.clamp(min=1)
    return (chosen - rejected - 1 / (2 * task.beta)).square()


def _apo_zero(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    return 1 - torch.sigmoid(task.beta * pairs.chosen) + torch.sigmoid(task.beta * pairs.rejected)


def _apo_down(pairs: Pairs, task: TaskConfig) -> torch.Tensor:
    margin = task.beta * (pairs.chosen - pairs.rejected)
    return torch.sigmoid(task.beta * pairs.chosen) + 1 - torch.sigmoid(margin)


_LOSSES: Mapping[PreferenceLoss, _Loss] = MappingProxyType(
    {
        PreferenceLoss.sigmoid: _sigmoid,
        PreferenceLoss.robust: _robust,
        PreferenceLoss.hinge: _hinge,
        PreferenceLoss.ipo: _ipo,
        PreferenceLoss.apo_zero: _apo_zero,
        PreferenceLoss.apo_down: _apo_down,
    }
)
"""The losses of `task.loss`."""


class DirectPreference(Objective):
    """DPO. An item is a pair."""

    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def __init__(self, task: TaskConfig, table: ReferenceTable) -> None:
        super().__init__()
        self._task, self._table = task, table
        self._loss = _LOSSES[task.loss]

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the pairs."""
        return are_pairs(Documents.of(batch)).sum()

    def begin(self, training: Training) -> None:
        """Compute the reference's log-probabilities of all pairs."""
        super().begin(training)
        self._table.fill(training, lambda batch: [batch])

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities."""
        return self._table.prepare(batch)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the pairs."""

        def reduce(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
            is_pair = are_pairs(documents)
            ratios = log_probabilities - documents.sum(batch[REFERENCE])
            chosen, rejected = torch.where(is_pair, ratios, 0), torch.where(is_pair, next_of(ratios), 0)
            lengths = documents.num_chosen_targets, next_of(documents.num_rejected_targets)
            losses = self._loss(Pairs(is_pair, chosen, rejected, *lengths), self._task)
            rewards = self._task.beta * chosen, self._task.beta * rejected
            margins = rewards[0] - rewards[1]
            values = [*rewards, margins, (margins > 0).float()]
            self._note(is_pair, dict(zip(self.names, values, strict=True)))
            return torch.where(is_pair, losses, 0).sum()

        return reduce_answers(self._training.head, model, batch, reduce)
