"""A table of values that are computed once for each document, before the first step, and kept for a resume.

batches of all steps, and of the held-out sets   ->  documents that are not known yet  ->  learned, written, read
                                                                                           (the run's folder)
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from hfdist.atomic_write import write_atomically
from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.config.batch import IGNORED
from hfdist.data.packing.sequence import IMAGE_DIGESTS, text_positions
from hfdist.strategies.engine import Batch
from hfdist.trainer.training import Training

logger = logging.getLogger(__name__)

_KNOWN = "known.json"
"""Name of the file that says for which streams all documents are known."""
_LOG_EVERY_SECONDS = 30.0

Learn = Callable[[Batch], bool]
"""Computes the values of a batch's documents that are not known yet. A collective.

It returns True if some rank lacked any of them."""


class Place(NamedTuple):
    """Where a document that has targets stands in a batch."""

    row: int
    start: int
    """Place of the document's first token in the row."""
    stop: int
    """Place after the document's last token."""
    key: int
    """Hash of the document's tokens, targets and images: the key of its values in a table."""


class DocumentTable:
    """Values of documents, by `Place.key`. Derived classes compute, write and read the values.

    Args:
        folder: the folder in which the values are kept.
        model: JSON values that name the model that gives the values; values of another model do not count.
    """

    title: str
    """Words for the log that name the values."""

    def __init__(self, folder: Path, model: object) -> None:
        self._folder, self._model = folder, json.dumps(model, sort_keys=True)
        self._num_sequences: dict[str, int] = {}
        """Number of sequences all of whose documents are known, by the identity of a stream."""

    # ---- what derived classes define ----

    @property
    def num_documents(self) -> int:
        """Number of documents whose values are known."""
        raise NotImplementedError

    def _write(self, rank: int) -> None:
        """Write the values that this rank has computed."""
        raise NotImplementedError

    def _read(self) -> None:
        """Read the values that all ranks have written, and none of another model."""
        raise NotImplementedError

    # ---- what all have ----

    def fill(self, training: Training, learning: Callable[[], AbstractContextManager[Learn]]) -> None:
        """Compute all values that are not known yet, for all steps and the held-out sets. A collective.

        Args:
            training: a training that has not begun.
            learning: makes a context in which a `Learn` may be called, and gives that `Learn`.
        """
        assert training.stream is not None
        stream, args = training.stream.at_beginning(), training.args
        num_sequences = args.max_steps * training.strategy.batch.global_batch_size
        num_batches = args.max_steps * args.gradient_accumulation_steps
        begin = time.monotonic()
        # A rank that cannot read takes the others along.
        on_all_ranks(self._read_kept)
        if self._num_sequences.get(stream.identity, 0) >= num_sequences:
            # A resume: only the held-out set may be another one.
            num_batches = 0
        batches = iter(stream.loader(batch_size=args.per_device_train_batch_size))
        with closing(batches), learning() as learn:
            needed = chain(_held_out(training.trainer), islice(batches, num_batches))
            has_learned = self._learn_all(needed, num_batches, learn)
        if not has_learned and not num_batches:
            return
        on_all_ranks(lambda: self._write(training.strategy.topology.rank))
        # Only now are all values on the disk: the file that says so comes after them.
        self._num_sequences[stream.identity] = max(num_sequences, self._num_sequences.get(stream.identity, 0))
        known = {"model": self._model, "num_sequences": self._num_sequences}
        on_rank_zero(lambda: write_atomically(self._folder / _KNOWN, json.dumps(known).encode()))
        on_all_ranks(self._read_kept)
        seconds = time.monotonic() - begin
        logger.info("%s of %s documents, in %.1f s", self.title, f"{self.num_documents:,}", seconds)

    def _learn_all(self, batches: Iterable[Batch], num_batches: int, learn: Learn) -> bool:
        """Learn the documents of batches; return whether any was not known, the same on all ranks."""
        logged_seconds, has_learned = time.monotonic(), False
        for number, batch in enumerate(batches):
            if learn(batch):
                has_learned = True
            if time.monotonic() - logged_seconds > _LOG_EVERY_SECONDS:
                logged_seconds = time.monotonic()
                logger.info("%s: %d batches of %d, and of the held-out set", self.title, number + 1, num_batches)
        return has_learned

    def _read_kept(self) -> None:
        self._num_sequences = {}
        path = self._folder / _KNOWN
        if path.is_file():
            # A damaged file counts for nothing: all batches are read again, which finds what is missing.
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                known = json.loads(path.read_text())
                if known["model"] == self._model:
                    self._num_sequences = {str(name): int(number) for name, number in known["num_sequences"].items()}
        self._read()


def _held_out(trainer: transformers.Trainer) -> Iterator[Batch]:
    """Give this rank's batches of all held-out sets, as many as the other ranks have."""
    if trainer.eval_dataset is not None:
        loaders = trainer.get_eval_dataloader()
        yield from chain.from_iterable(loaders.values() if isinstance(loaders, dict) else [loaders])


def places(batch: Batch) -> Iterator[Place]:
    """Give the place of each document that has a target, in the order of rows; the batch is on the CPU."""
    ids, is_ignored = batch["input_ids"].numpy(), (batch["labels"] == IGNORED).numpy()
    images = batch.get(IMAGE_DIGESTS)
    for row in range(len(ids)):
        for start, stop in pairwise([*_starts(batch, row), ids.shape[1]]):
            if is_ignored[row, start:stop].all():
                continue
            content = ids[row, start:stop].tobytes() + is_ignored[row, start:stop].tobytes()
            if images is not None and images[row, start]:
                # The same tokens may stand for other images.
                content += images[row, start].numpy().tobytes()
            key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            yield Place(row, start, stop, key)


def _starts(batch: Batch, row: int) -> list[int]:
    """Give the places of the first tokens of a row's documents; a row without positions is one document."""
    if "position_ids" not in batch:
        return [0]
    positions = text_positions(batch["position_ids"])[row]
    later_starts = torch.nonzero(positions[1:] == 0)[:, 0] + 1
    return [0, *later_starts.tolist()]
