"""DPO with a reference model that follows the trained one, so each step computes the reference's log-probabilities."""

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
from hfdist.tune.reference import REFERENCE, bind_log_probabilities
from hfdist.tune.reference_weights import ReferenceWeights, following
from hfdist.tune.shared_values import share_values


class FollowedPreferences(Preferences):
    """DPO with a reference that follows the model. An item is a pair."""

    # What `begin` sets.
    _weights: ReferenceWeights

    def __init__(self, task: TaskConfig) -> None:
        super().__init__(task, None)
        self._log_probabilities: dict[int, float] = {}
        """The reference's log-probability of each document of this step or evaluation, by the document's key."""

    def begin(self, training: Training) -> None:
        """Keep the first weights, with which the model is compared."""
        super().begin(training)
        self._weights = ReferenceWeights(training.engine)

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probabilities to a batch of this step or evaluation, under the key REFERENCE."""
        values = torch.zeros(batch["labels"].shape)
        for place in places(batch):
            values[place.row, place.start] = self._log_probabilities[place.key]
        return batch | {REFERENCE: values}

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callback that lets the reference follow the model."""
        return following(self._task, lambda: self._weights)

    def outer_state(self) -> OuterState | None:
        """Give the reference's weights: a checkpoint has them, as they do not follow from the config."""
        return self._weights

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Compute the reference's log-probabilities of a step's documents, and count its pairs. A collective."""
        with evaluating(self._training, are_training=True) as forward:
            self._compute(batches, forward)
        return super().begin_step(batches, hooks)

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Compute the reference's log-probabilities of all held-out documents, and count the pairs. A collective."""
        self._compute(self._counted(batches), forward)

    def _compute(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Compute the reference's log-probabilities of the documents of batches. A collective."""
        self._log_probabilities = {}
        log_probabilities_of = bind_log_probabilities(self._training)
        with self._weights.in_place():
            for batch in batches:
                values = share_values(self._training, batch, forward, log_probabilities_of)
                for place in places(batch):
                    self._log_probabilities[place.key] = float(values[place.row, place.start])
