"""Online DPO (arXiv 2402.04792): the model answers prompts, and the best and the worst answer to one become a pair.

    prompts  ->  answers, rewards (rollout.py)  ->  a pair for each prompt  ->  the loss of pairs (preference.py)

The pair is a row of two documents, as the rows of `task=dpo` are:

    prompt, best answer | prompt, worst answer | what fills the row

Answers that all have one reward give no pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.data.marks import reject_labels
from hfdist.strategies.engine import Batch, TrainerHooks
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.training import Training
from hfdist.tune.own_answers import OwnAnswers
from hfdist.tune.preference import Preferences
from hfdist.tune.reference import REFERENCE, bind_log_probabilities
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_rows import LEAST_TOKENS, REWARDS
from hfdist.tune.shared_values import share_values

_NAMES = ("input_ids", "labels", "position_ids")
"""Names of the tensors in a batch of pairs."""


class OnlinePreferences(OwnAnswers):
    """Pairs of the model's own answers. An item is a pair."""

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__(task, rollouts)
        self._pairs = Preferences(task, None)
        self.names = rollouts.names

    def begin(self, training: Training) -> None:
        """Begin the rollouts, keep the reference's weights, and begin the loss of pairs."""
        super().begin(training)
        self._pairs.begin(training)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the pairs of a batch; in a batch of prompts, which the Trainer counts before the answers, the rows."""
        is_answered = "position_ids" in batch
        if not is_answered:
            return (batch["labels"] != IGNORED).any(1).sum()
        return self._pairs.count(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Have the prompts of a step answered; give the pairs, with the reference's log-probabilities."""
        log_probabilities_of = bind_log_probabilities(self._training)
        pairs = [pair_up(batch, self._task.num_generations) for batch in self.answer(batches)]
        with evaluating(self._training, are_training=True) as forward, self._kept().in_place():
            for batch in pairs:
                batch[REFERENCE] = share_values(self._training, batch, forward, log_probabilities_of)
        return self._pairs.begin_step(pairs, hooks)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the pairs."""
        return self._pairs.loss(model, batch)

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Add the figures of pairs."""
        return super().figures(trains=trains) | self._pairs.figures(trains=trains)


def pair_up(batch: Batch, num_answers: int) -> Batch:
    """Make a row for each prompt, with its best answer and its worst one, the first of equal answers.

    Args:
        batch: answers with REWARDS; the answers to one prompt are `num_answers` rows, one after another.
        num_answers: number of answers to each prompt.

    Returns:
        A batch with `input_ids`, `labels` and `position_ids`; a row without a pair has no target.
    """
    totals = batch[REWARDS].sum(1).tolist()
    rows = [_join(batch, range(first, first + num_answers), totals) for first in range(0, len(totals), num_answers)]
    width = max(LEAST_TOKENS, *(len(row["labels"]) for row in rows))
    filled = [_fill(row, width) for row in rows]
    return {name: torch.stack([row[name] for row in filled]) for name in _NAMES}


def _join(batch: Batch, group: range, totals: Sequence[float]) -> Batch:
    """Give the two documents of a prompt's pair as one row of their length, of shape [tokens]; no tokens: no pair."""
    best, worst = max(group, key=totals.__getitem__), min(group, key=totals.__getitem__)
    chosen, rejected = _document(batch, best), _document(batch, worst)
    if totals[best] == totals[worst]:
        return {name: values[:0] for name, values in chosen.items()}
    rejected["labels"] = reject_labels(rejected["labels"])
    return {name: torch.cat([values, rejected[name]]) for name, values in chosen.items()}


def _fill(row: Batch, width: int) -> Batch:
    """Fill a row up with a document of its own, of any tokens, without targets; shape [width]."""
    places = torch.arange(width - len(row["labels"]))
    filling = {
        "input_ids": torch.zeros_like(places),
        "labels": torch.full_like(places, IGNORED),
        "position_ids": places,
    }
    return {name: torch.cat([row[name], filling[name]]) for name in _NAMES}


def _document(batch: Batch, row: int) -> Batch:
    """Give prompt and answer of a row, without what fills it; shape [tokens]."""
    targets = (batch["labels"][row] != IGNORED).nonzero()
    stop = int(targets[-1]) + 1 if len(targets) else 0
    return {name: batch[name][row, :stop] for name in _NAMES}
