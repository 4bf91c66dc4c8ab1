"""A teacher's likeliest tokens at each target, computed once before the first step, and kept on disk by document.

A file of safetensors has as many documents as `_FILE_BYTES` have room for:

    keys               [documents]          hashes of what documents hold
    starts             [documents + 1]      targets starts[i] to starts[i + 1] are those of document i
    ids                [targets, K]         the teacher's likeliest tokens
    log_probabilities  [targets, K + 1]     log-probabilities of these tokens, and of all other tokens together

A batch reads the targets of its documents alone. So while the student trains, the teacher is in no memory, and memory
has the keys alone.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel

from hfdist.atomic_write import write_atomically
from hfdist.collectives import gather_json, on_all_ranks
from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.errors import CheckpointError, ResourceError
from hfdist.models.frozen import fingerprint
from hfdist.models.loss.chunked import CHUNK_LOGITS, TENSORS_OF_DIVERGENCE
from hfdist.models.loss.distillation import TOP_IDS, TOP_LOGS, top_bytes, top_rows
from hfdist.models.loss.teacher_rows import TeacherRows, WholeRows
from hfdist.strategies.engine import Batch
from hfdist.trainer.training import Training
from hfdist.tune.document_table import DocumentTable, Learn, Place, places
from hfdist.tune.teacher import Teacher
from hfdist.units import size

logger = logging.getLogger(__name__)

_FILE_BYTES = 256 * 2**20
"""Bytes of targets after which a rank writes a file."""
_OPEN_FILES = 64
"""The most files that a rank has open."""


class _Where(NamedTuple):
    """Where the targets of a document are kept."""

    file: Path
    start: int
    """Number of the document's first target in the file."""
    stop: int
    """Number after that of the document's last target."""


class _Taught(NamedTuple):
    """What the teacher says of a document, before it is written."""

    key: int
    """Key of the document."""
    ids: np.ndarray
    """Likeliest tokens; shape [targets, K]."""
    logs: np.ndarray
    """Log-probabilities of these tokens, and of all others together; shape [targets, K + 1]."""


class KeptTeacher(DocumentTable):
    """Reads the teacher once, keeps its `task.teacher_top_k` likeliest tokens, and frees it.

    Args:
        folder: the folder in which the tokens are kept.
        teacher: the teacher, which is read at the first call of it.
        task: `task.*` of the run.
    """

    title = "task.teacher: likeliest tokens"

    # What `begin` sets.
    _training: Training
    _vocabulary: int

    def __init__(self, folder: Path, teacher: Teacher, task: TaskConfig) -> None:
        assert task.teacher_top_k is not None
        model = [task.teacher, fingerprint(str(task.teacher)), task.teacher_top_k, task.temperature]
        super().__init__(folder, model)
        self._teacher, self._count, self._beta = teacher, task.teacher_top_k, task.divergence_beta
        self._known: dict[int, _Where | None] = {}
        """The place of a document's targets by its key; None: a rank has learned them, and no file of them is read."""
        self._learned: list[_Taught] = []
        """Documents that this rank has learned and not written yet."""
        self._open = lru_cache(_OPEN_FILES)(lambda path: safe_open(path, "np"))

    @property
    def num_documents(self) -> int:
        """Number of documents whose likeliest tokens are known."""
        return len(self._known)

    def begin(self, training: Training) -> None:
        """Compute the tokens that are not known yet, for all steps and the held-out sets. A collective.

        Raises:
            ResourceError: the disk is full.
        """
        self._training = training
        self._vocabulary = cast(PreTrainedModel, training.model).config.get_text_config().vocab_size
        batch = training.strategy.batch
        num_targets = training.args.max_steps * batch.global_batch_size * batch.sequence_length
        most = size(num_targets * top_bytes(self._count))
        logger.info("task.teacher_top_k=%d: kept in %s, of at most %s", self._count, self._folder, most)
        self.fill(training, self._learning)

    def prepare(self, batch: Batch) -> Batch:
        """Add the likeliest tokens at a batch's targets, under TOP_IDS and TOP_LOGS.

        Raises:
            CheckpointError: a document is not known, or a file is damaged.
        """
        shape = batch["labels"].shape
        ids = torch.zeros(*shape, self._count, dtype=torch.int32)
        logs = torch.zeros(*shape, self._count + 1)
        for place in places(batch):
            where = self._known.get(place.key)
            targets = _targets(batch, place)
            if where is None or where.stop - where.start != len(targets):
                what = "what the teacher says of a document is missing: the data have changed"
                raise CheckpointError(what, where=str(self._folder), hint="a new run.name")
            ids[place.row, targets], logs[place.row, targets] = self._load(where)
        return batch | {TOP_IDS: ids, TOP_LOGS: logs}

    def rows(self, batch: Batch) -> AbstractContextManager[TeacherRows]:
        """Give what the teacher says of all tokens of a prepared batch but the first of each row."""
        return nullcontext(top_rows(batch, beta=self._beta))

    def _load(self, where: _Where) -> tuple[torch.Tensor, torch.Tensor]:
        """Read likeliest tokens, [targets, K], and log-probabilities, [targets, K + 1]."""
        try:
            file = self._open(where.file)
            ids, logs = (file.get_slice(name)[where.start : where.stop] for name in ("ids", "log_probabilities"))
        except (SafetensorError, OSError) as error:
            raise self._damaged(where.file) from error
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise self._damaged(where.file)
        return torch.from_numpy(ids), torch.from_numpy(logs)

    def _damaged(self, path: Path) -> CheckpointError:
        what, hint = "a file of the teacher's likeliest tokens is damaged", f"rm -r {self._folder}, and start again"
        return CheckpointError(what, where=str(path), hint=hint)

    # ---- learning ----

    @contextmanager
    def _learning(self) -> Iterator[Learn]:
        """Make the context in which the teacher reads batches; it is freed after them."""
        with self._training.waiting("the teacher reads the rows"), self._training.accelerator.autocast():
            yield self._learn
        self._teacher.free()

    def _learn(self, batch: Batch) -> bool:
        """Learn a batch, whose rows the ranks of a model replica share: rank i of n takes rows i, i + n, ...

        It is a `Learn`: a collective, which returns whether some rank lacked any document.
        """
        documents = list(places(batch))
        lacks_any = any(place.key not in self._known for place in documents)
        if not any(gather_json(lacks_any)):
            return False
        topology, rows_at_once = self._training.strategy.topology, self._training.strategy.batch.micro_batch_size
        rank_of_replica = topology.pipeline_rank * topology.tensor + topology.rank % topology.tensor
        num_rows = len(batch["labels"])
        own_rows = range(rank_of_replica, num_rows, topology.model)
        most_rows = -(-num_rows // topology.model)
        for first in range(0, most_rows, rows_at_once):
            rows = list(own_rows[first : first + rows_at_once])
            # All ranks run equally many forwards, as they may have shards of the teacher: one without rows reads row 0.
            part = {name: tensor[rows or [0]] for name, tensor in batch.items()}
            ids, logs = self._ask_teacher(part)
            if rows:
                self._note_taught(part, ids, logs)
        for place in documents:
            self._known.setdefault(place.key, None)
        on_all_ranks(self._write_if_full)
        return True

    def _ask_teacher(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Give the likeliest tokens [targets, K] and the log-probabilities [targets, K + 1] at a batch's targets."""
        moved = {name: tensor.to(self._training.args.device) for name, tensor in batch.items()}
        is_target = (moved["labels"][:, 1:] != IGNORED).flatten()
        with self._teacher.rows(moved) as taught:
            at_targets = taught.part(is_target)
            num_at_once = max(1, CHUNK_LOGITS[is_target.device.type] // TENSORS_OF_DIVERGENCE // self._vocabulary)
            # At least one part: a slice of no rows has the right shape.
            parts = [
                likeliest(at_targets.part(slice(first, first + num_at_once)), self._vocabulary, self._count)
                for first in range(0, max(1, int(is_target.sum())), num_at_once)
            ]
        ids = torch.cat([part_ids for part_ids, _ in parts])
        logs = torch.cat([part_logs for _, part_logs in parts])
        return ids.cpu().numpy(), logs.cpu().numpy()

    def _note_taught(self, batch: Batch, ids: np.ndarray, logs: np.ndarray) -> None:
        """Keep what the teacher says of the new documents of a batch, whose targets follow each other."""
        first = 0
        for place in places(batch):
            stop = first + len(_targets(batch, place))
            if place.key not in self._known:
                self._known[place.key] = None
                self._learned.append(_Taught(place.key, ids[first:stop], logs[first:stop]))
            first = stop
        assert first == len(ids), "the first token of a document is a target"

    def _write_if_full(self) -> None:
        num_targets = sum(len(taught.ids) for taught in self._learned)
        if num_targets * top_bytes(self._count) >= _FILE_BYTES:
            self._write(self._training.strategy.topology.rank)

    def _write(self, rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        if not self._learned:
            return
        learned, self._learned = self._learned, []
        columns = {
            "keys": np.array([taught.key for taught in learned], dtype=np.uint64),
            "starts": np.cumsum([0, *(len(taught.ids) for taught in learned)], dtype=np.int64),
            "ids": np.concatenate([taught.ids for taught in learned]),
            "log_probabilities": np.concatenate([taught.logs for taught in learned]),
        }
        content = save(columns, metadata={"model": self._model})
        free = shutil.disk_usage(self._folder).free
        if free < len(content):
            what, found = "the disk has no room for the teacher's likeliest tokens", f"{size(free)} free"
            hint = f"task.teacher_top_k={max(1, self._count // 2)}, or another run.dir"
            raise ResourceError(what, where=str(self._folder), found=found, hint=hint)
        number = len(list(self._folder.glob(f"rank-{rank:05d}-*.safetensors")))
        write_atomically(self._folder / f"rank-{rank:05d}-{number:05d}.safetensors", content)

    def _read(self) -> None:
        self._known = {}
        for path in sorted(self._folder.glob("rank-*.safetensors")):
            try:
                with safe_open(path, "np") as file:
                    if file.metadata().get("model") != self._model:
                        continue
                    keys, starts = (file.get_tensor(name).tolist() for name in ("keys", "starts"))
                    shapes = [file.get_slice(name).get_shape() for name in ("ids", "log_probabilities")]
            except (SafetensorError, OSError, AttributeError) as error:
                raise self._damaged(path) from error
            are_starts = starts[:1] == [0] and starts == sorted(starts) and len(starts) == len(keys) + 1
            if not are_starts or shapes != [[starts[-1], self._count], [starts[-1], self._count + 1]]:
                raise self._damaged(path)
            kept = [_Where(path, start, stop) for start, stop in pairwise(starts)]
            self._known |= dict(zip(keys, kept, strict=True))


def _targets(batch: Batch, place: Place) -> torch.Tensor:
    """Give the places in its row of a document's targets; the first token is none, as nothing predicts it."""
    is_target = batch["labels"][place.row, place.start + 1 : place.stop] != IGNORED
    return torch.nonzero(is_target)[:, 0] + place.start + 1


def likeliest(teacher: WholeRows, vocabulary: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the likeliest tokens of each row, and log-probabilities of these tokens and of all others together.

    Args:
        teacher: says how likely each token is.
        vocabulary: number of tokens that the student has.
        count: number of likeliest tokens.

    Returns:
        Tokens, int32 of shape [rows, count], and log-probabilities of shape [rows, count + 1].
    """
    logs = teacher.log_probabilities(vocabulary)
    top, ids = logs.topk(count, -1)
    others = logs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return ids.int(), torch.cat([top, others], 1)
