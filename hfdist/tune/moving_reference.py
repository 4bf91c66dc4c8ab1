"""A reference of pairs that follows the model: its log-probabilities are computed in each step and each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.training import Training
from hfdist.tune.document_table import places
from hfdist.tune.reference import REFERENCE, log_probabilities_of_answers
from hfdist.tune.reference_weights import ReferenceWeights
from hfdist.tune.shared_values import share_values


class MovingReference:
    """What `ReferenceTable` is for a reference that stays."""

    # What `compute` sets.
    _training: Training
    weights: ReferenceWeights

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        """Log-probabilities by the key of a document, of the last step or evaluation."""

    def compute(self, training: Training, parts: Callable[[Batch], list[Batch]]) -> None:
        """Keep the weights that the model is compared with."""
        self._training, self.weights = training, ReferenceWeights(training.engine)

    def learn(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Compute the log-probabilities of the documents of batches. A collective."""
        self._known = {}
        of_answers = partial(log_probabilities_of_answers, self._training.head)
        with self.weights.in_place():
            for batch in batches:
                values = share_values(self._training, batch, forward, of_answers)
                self._known |= {key: float(values[row, start]) for row, start, _, key in places(batch)}

    def prepare(self, batch: Batch) -> Batch:
        """Add the log-probabilities of a batch's documents, under the key REFERENCE."""
        values = torch.zeros(batch["labels"].shape)
        for row, start, _, key in places(batch):
            values[row, start] = self._known[key]
        return batch | {REFERENCE: values}
