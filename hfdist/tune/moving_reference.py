"""Pairs whose reference follows the model: its log-probabilities are computed in each step and each evaluation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import TrainerCallback

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.checkpointing.save_options import OuterState
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.training import Training
from hfdist.tune.document_table import places
from hfdist.tune.preference import Preferences
from hfdist.tune.reference import REFERENCE, answers_of
from hfdist.tune.reference_weights import ReferenceWeights, following
from hfdist.tune.shared_values import share_values


class FollowedPreferences(Preferences):
    """DPO with a reference that follows the model. An item is a pair."""

    # What `begin` sets.
    _weights: ReferenceWeights

    def __init__(self, task: TaskConfig) -> None:
        super().__init__(task, None)
        self._known: dict[int, float] = {}
        """The reference's log-probabilities by the key of a document, of the last step or evaluation."""

    def begin(self, training: Training) -> None:
        """Keep the weights that the model is compared with."""
        super().begin(training)
        self._weights = ReferenceWeights(training.engine)

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities of a batch of this step or evaluation."""
        values = torch.zeros(batch["labels"].shape)
        for row, start, _, key in places(batch):
            values[row, start] = self._known[key]
        return batch | {REFERENCE: values}

    def callbacks(self) -> list[TrainerCallback]:
        """Give what lets the reference follow the model."""
        return following(self._task, lambda: self._weights)

    def outer_state(self) -> OuterState | None:
        """Give the reference."""
        return self._weights

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Ask the reference; see the base class."""
        with evaluating(self._training, are_training=True) as forward:
            self._learn(batches, forward)
        return super().begin_step(batches, hooks)

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Ask the reference; see the base class."""
        self._learn(self._counted(batches), forward)

    def _learn(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Compute the log-probabilities of the documents of batches. A collective."""
        self._known = {}
        of_answers = answers_of(self._training)
        with self._weights.in_place():
            for batch in batches:
                values = share_values(self._training, batch, forward, of_answers)
                self._known |= {key: float(values[row, start]) for row, start, _, key in places(batch)}
