"""The reference model's log-probabilities: computed once, before the first step, and kept by document.

Before the first step the model is the reference. So no second model is in memory, and every layout can do it: it is an
evaluation. The log-probabilities are kept in the run's folder, where a resume in any layout finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import nn

from hfdist.atomic_write import write_atomically
from hfdist.collectives import gather_json
from hfdist.errors import CheckpointError, first_line
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Documents, reduce_answers
from hfdist.trainer.training import Training
from hfdist.tune.document_table import DocumentTable, Learn, places

_DAMAGED = (EOFError, BadZipFile, MemoryError, LookupError, ValueError, TypeError, AttributeError)
"""What numpy raises on the contents of files that are none of its own, whatever sizes they claim."""
REFERENCE = "reference"
"""Key of a batch: the reference's log-probability of each document, at its first token; shape [rows, tokens]."""


class ReferenceTable(DocumentTable):
    """Log-probabilities of documents; see the base class."""

    title = "reference: log-probabilities"

    def __init__(self, folder: Path, model: object) -> None:
        super().__init__(folder, model)
        self._known: dict[int, float | None] = {}
        """Log-probabilities by the key of a document; None: some rank has learned it, and it is not read yet."""
        self._learned: dict[int, float] = {}
        """What this rank has learned, and not written yet."""

    @property
    def num_documents(self) -> int:
        """See the base class."""
        return len(self._known)

    def compute(self, training: Training, parts: Callable[[Batch], list[Batch]]) -> None:
        """Compute what is not known yet of all steps and of the held-out set. A collective.

        Args:
            training: a training whose weights are still those of the reference.
            parts: gives, for a batch, all batches whose documents are needed.
        """

        @contextmanager
        def learning() -> Iterator[Learn]:
            was_training, answers = training.model.training, answers_of(training)
            with evaluating(training) as forward:
                # A sum, and not `any`: every part must be learned.
                yield lambda batch: sum(self._learn(part, forward, answers) for part in parts(batch)) > 0
            training.model.train(was_training)

        self.fill(training, learning)

    def prepare(self, batch: Batch) -> Batch:
        """Add the log-probabilities of a batch's documents, under the key REFERENCE.

        Raises:
            CheckpointError: a document is not known.
        """
        values = torch.zeros(batch["labels"].shape)
        for row, start, _, key in places(batch):
            known = self._known.get(key)
            if known is None:
                what = "the reference's log-probability of a document is missing: the data have changed"
                raise CheckpointError(what, where=str(self._folder), hint="a new run.name")
            values[row, start] = known
        return batch | {REFERENCE: values}

    def _learn(self, batch: Batch, forward: Forward, answers: Callable[[nn.Module, Batch], torch.Tensor]) -> bool:
        """Compute what is not known yet of the documents of a batch; whether some rank lacked any. A collective."""
        found_places = list(places(batch))
        # All ranks of a model replica, and under ZeRO-3 all ranks, run the same forwards.
        if not any(gather_json(any(place.key not in self._known for place in found_places))):
            return False
        values = forward(batch, answers)
        found = torch.cat(values)[: len(batch["labels"])].cpu() if values else None
        for row, start, _, key in found_places:
            if key not in self._known and found is not None:
                self._learned[key] = float(found[row, start])
            self._known.setdefault(key, None)
        return True

    def _write(self, rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank-{rank:05d}.npz"
        # Not what other ranks have written: each start would multiply it by the number of ranks.
        own = (self._read_file(path) if path.is_file() else {}) | self._learned
        self._learned = {}
        columns: dict[str, Any] = {
            "keys": np.array(list(own), dtype=np.uint64),
            "values": np.array(list(own.values()), dtype=np.float64),
            "model": np.array(self._model),
        }
        write_atomically(path, lambda file: np.savez(file, **columns))

    def _read(self) -> None:
        self._known = {}
        for path in sorted(self._folder.glob("rank-*.npz")):
            self._known |= self._read_file(path)

    def _read_file(self, path: Path) -> dict[int, float]:
        """Give what a file holds of this model; CheckpointError: it is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                if str(file["model"]) != self._model:
                    return {}
                return dict(zip(file["keys"].tolist(), file["values"].tolist(), strict=True))
        except _DAMAGED as error:
            what, hint = (
                "a file of the reference's log-probabilities is damaged",
                f"rm -r {self._folder}, and start again",
            )
            raise CheckpointError(what, where=str(path), found=first_line(error), hint=hint) from error


def answers_of(training: Training) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """Give what computes, of a model and a batch, the log-probability of each document's answer at its first token.

    It gives a tensor of shape [rows, tokens].
    """

    def place(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
        return torch.where(documents.is_first, log_probabilities[documents.of_token], 0.0)

    return lambda model, batch: reduce_answers(training, model, batch, place)
