"""The reference model's log-probabilities: computed once, before the first step, and kept by document.

Before the first step the model is the reference. So no second model is in memory, and every layout can do it: it is an
evaluation. The log-probabilities are kept in the run's folder, where a resume in any layout finds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from hfdist.atomic_write import write_atomically
from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero
from hfdist.config.batch import IGNORED
from hfdist.errors import CheckpointError
from hfdist.models.loss import LossHead
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Documents, reduce_answers
from hfdist.trainer.training import Training

logger = logging.getLogger(__name__)

REFERENCE = "reference"
"""Key of a batch: the reference's log-probability of each document, at its first token; shape [rows, tokens]."""
_KNOWN = "known.json"
"""Name of the file that says for which streams all documents are known."""
_LOG_EVERY_SECONDS = 30.0


class ReferenceTable:
    """Log-probabilities of documents, by a hash of what a document holds.

    Args:
        folder: the folder in which they are kept.
        model: JSON values that name the reference model; those of another model do not count.
    """

    def __init__(self, folder: Path, model: object) -> None:
        self._folder, self._model = folder, json.dumps(model, sort_keys=True)
        self._known: dict[int, float | None] = {}
        """Log-probabilities by the key of a document; None: another rank has found it."""
        self._num_sequences: dict[str, int] = {}
        """Number of sequences all of whose documents are known, by the identity of a stream."""

    def fill(self, training: Training, parts: Callable[[Batch], list[Batch]]) -> None:
        """Compute what is not known yet of all steps and of the held-out set. A collective.

        Args:
            training: a training whose weights are still those of the reference.
            parts: gives, for a batch, all batches whose documents are needed.
        """
        assert training.stream is not None
        stream, args = training.stream.at_beginning(), training.args
        num_sequences = args.max_steps * training.strategy.batch.global_batch_size
        num_batches, began = args.max_steps * args.gradient_accumulation_steps, time.monotonic()
        self._read()
        if self._num_sequences.get(stream.identity, 0) >= num_sequences:
            # A resume: only the held-out set may be another one.
            num_batches = 0
        was_training = training.model.training
        batches = iter(stream.loader(batch_size=args.per_device_train_batch_size))
        with closing(batches), evaluating(training) as forward:
            asked = chain(_held_out(training.trainer), islice(batches, num_batches))
            has_learned = self._learn_all(asked, num_batches, parts, forward, training.head)
        training.model.train(was_training)
        if not has_learned and not num_batches:
            return
        on_all_ranks(lambda: self._write(training.strategy.topology.rank))
        # Only now are all numbers there.
        self._num_sequences[stream.identity] = max(num_sequences, self._num_sequences.get(stream.identity, 0))
        known = {"model": self._model, "num_sequences": self._num_sequences}
        on_rank_zero(lambda: write_atomically(self._folder / _KNOWN, json.dumps(known).encode()))
        self._read()
        seconds = time.monotonic() - began
        logger.info("reference: log-probabilities of %s documents, in %.1f s", f"{len(self._known):,}", seconds)

    def _learn_all(
        self,
        batches: Iterable[Batch],
        num_batches: int,
        parts: Callable[[Batch], list[Batch]],
        forward: Forward,
        head: LossHead | None,
    ) -> bool:
        """Compute what is not known yet of the documents of batches; whether there was any, the same on all ranks."""
        logged, has_learned = time.monotonic(), False
        for number, batch in enumerate(batches):
            for part in parts(batch):
                has_learned = self._learn(part, forward, partial(log_probabilities_of_answers, head)) or has_learned
            if time.monotonic() - logged > _LOG_EVERY_SECONDS:
                logged = time.monotonic()
                logger.info("reference: %d batches of %d, and of the held-out set", number + 1, num_batches)
        return has_learned

    def prepare(self, batch: Batch) -> Batch:
        """Add the log-probabilities of a batch's documents, under the key REFERENCE.

        Raises:
            CheckpointError: a document is not known.
        """
        values = torch.zeros(batch["labels"].shape)
        for row, start, key in keys_of_documents(batch):
            known = self._known.get(key)
            if known is None:
                what = "the reference's log-probability of a document is missing: the data have changed"
                raise CheckpointError(what, where=str(self._folder), hint="a new run.name")
            values[row, start] = known
        return batch | {REFERENCE: values}

    def _learn(self, batch: Batch, forward: Forward, answers: Callable[[nn.Module, Batch], torch.Tensor]) -> bool:
        """Compute what is not known yet of the documents of a batch; whether some rank lacked any. A collective."""
        keys = list(keys_of_documents(batch))
        # All ranks of a model replica, and under ZeRO-3 all ranks, run the same forwards.
        if not any(gather_json(any(key not in self._known for *_, key in keys))):
            return False
        values = forward(batch, answers)
        found = torch.cat(values)[: len(batch["labels"])].cpu() if values else None
        for row, start, key in keys:
            self._known[key] = None if found is None else float(found[row, start])
        return True

    def _write(self, rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        known = {key: value for key, value in self._known.items() if value is not None}
        columns: dict[str, Any] = {
            "keys": np.array(list(known), dtype=np.uint64),
            "values": np.array(list(known.values()), dtype=np.float64),
            "model": np.array(self._model),
        }
        write_atomically(self._folder / f"rank-{rank:05d}.npz", lambda file: np.savez(file, **columns))

    def _read(self) -> None:
        """Read what all ranks have written; log-probabilities of another model do not count."""
        self._known, self._num_sequences = {}, {}
        path = self._folder / _KNOWN
        if path.is_file() and (known := json.loads(path.read_text()))["model"] == self._model:
            self._num_sequences = known["num_sequences"]
        for path in sorted(self._folder.glob("rank-*.npz")):
            with np.load(path, allow_pickle=False) as file:
                if str(file["model"]) == self._model:
                    self._known |= dict(zip(file["keys"].tolist(), file["values"].tolist(), strict=True))


def _held_out(trainer: transformers.Trainer) -> Iterator[Batch]:
    """Give this rank's batches of all held-out sets, as many as the other ranks have."""
    if trainer.eval_dataset is not None:
        loaders = trainer.get_eval_dataloader()
        yield from chain.from_iterable(loaders.values() if isinstance(loaders, dict) else [loaders])


def log_probabilities_of_answers(head: LossHead | None, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Give the log-probability of each document's answer at its first token; shape [rows, tokens]."""

    def place(documents: Documents, log_probabilities: torch.Tensor) -> torch.Tensor:
        return torch.where(documents.is_first, log_probabilities[documents.of_token], 0.0)

    return reduce_answers(head, model, batch, place)


def keys_of_documents(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Give the row and the first token of each document with a target, and a hash of what it holds."""
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    starts = batch["position_ids"].numpy() == 0
    for row, is_start in enumerate(starts):
        places = [*np.flatnonzero(is_start).tolist(), len(is_start)]
        for start, stop in pairwise(places):
            if (labels[row, start:stop] != IGNORED).any():
                content = ids[row, start:stop].tobytes() + (labels[row, start:stop] == IGNORED).tobytes()
                yield row, start, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
