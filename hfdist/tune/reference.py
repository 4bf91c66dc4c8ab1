"""The reference model's log-probabilities: computed once, before the first step, and kept by document.

Before the first step the trained model is the reference. So no second model is in memory, and every layout can compute
them: that is an evaluation. They are kept in the run's folder, where a resume in any layout finds them.
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
"""Key in a batch: the reference's log-probability of each document, at its first token; shape [rows, tokens]."""

LogProbabilitiesOf = Callable[[nn.Module, Batch], torch.Tensor]
"""Gives the log-probability of each document's answer, at the document's first token, by a model; [rows, tokens]."""


class ReferenceTable(DocumentTable):
    """The reference's log-probability of each document's answer, by the key of the document."""

    title = "reference: log-probabilities"

    def __init__(self, folder: Path, model: object) -> None:
        super().__init__(folder, model)
        self._known: dict[int, float | None] = {}
        """Log-probabilities by the key of a document; None: a rank has learned it, and its file is not read yet."""
        self._learned: dict[int, float] = {}
        """Log-probabilities that this rank has learned and not written yet, by the key of a document."""

    @property
    def num_documents(self) -> int:
        """Number of documents whose log-probabilities are known."""
        return len(self._known)

    def compute(self, training: Training, parts: Callable[[Batch], list[Batch]]) -> None:
        """Compute the log-probabilities that are not known yet, for all steps and the held-out set. A collective.

        Args:
            training: a training whose weights are still those of the reference.
            parts: gives, for a batch, all batches whose documents are needed.
        """

        @contextmanager
        def learning() -> Iterator[Learn]:
            was_training = training.model.training
            log_probabilities_of = bind_log_probabilities(training)
            with evaluating(training) as forward:

                def learn(batch: Batch) -> bool:
                    has_learned = False
                    for part in parts(batch):
                        if self._learn(part, forward, log_probabilities_of):
                            has_learned = True
                    return has_learned

                yield learn
            training.model.train(was_training)

        self.fill(training, learning)

    def prepare(self, batch: Batch) -> Batch:
        """Add the log-probabilities of a batch's documents, under the key REFERENCE.

        Raises:
            CheckpointError: a document is not known.
        """
        values = torch.zeros(batch["labels"].shape)
        for place in places(batch):
            known = self._known.get(place.key)
            if known is None:
                what = "the reference's log-probability of a document is missing: the data have changed"
                raise CheckpointError(what, where=str(self._folder), hint="a new run.name")
            values[place.row, place.start] = known
        return batch | {REFERENCE: values}

    def _learn(self, batch: Batch, forward: Forward, log_probabilities_of: LogProbabilitiesOf) -> bool:
        """Learn the documents of a batch that are not known; return whether some rank lacked any. A collective."""
        documents = list(places(batch))
        lacks_any = any(place.key not in self._known for place in documents)
        # All ranks of a model replica, and under ZeRO-3 all ranks, run the same forwards.
        if not any(gather_json(lacks_any)):
            return False
        parts = forward(batch, log_probabilities_of)
        # A rank without the last stage of a pipeline gets nothing. Rows that fill up a pipeline come last.
        values = torch.cat(parts)[: len(batch["labels"])].cpu() if parts else None
        for place in documents:
            if place.key in self._known:
                continue
            if values is not None:
                self._learned[place.key] = float(values[place.row, place.start])
            self._known[place.key] = None
        return True

    def _write(self, rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank-{rank:05d}.npz"
        # Not what other ranks have written: each start would multiply it by the number of ranks.
        written = self._read_file(path) if path.is_file() else {}
        own = written | self._learned
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
        """Read a file's log-probabilities by this model; CheckpointError: the file is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                if str(file["model"]) != self._model:
                    return {}
                return dict(zip(file["keys"].tolist(), file["values"].tolist(), strict=True))
        except _DAMAGED as error:
            what = "a file of the reference's log-probabilities is damaged"
            hint = f"rm -r {self._folder}, and start again"
            raise CheckpointError(what, where=str(path), found=first_line(error), hint=hint) from error


def bind_log_probabilities(training: Training) -> LogProbabilitiesOf:
    """Give a function that computes the log-probability of each document's answer, by a forward of a model on a batch.

    It gives them at the first token of each document, and 0 elsewhere; shape [rows, tokens].
    """

    def place(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
        return torch.where(documents.is_first, log_probabilities[documents.of_token], 0.0)

    return lambda model, batch: reduce_answers(training, model, batch, place)
