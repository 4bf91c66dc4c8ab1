"""A teacher's likeliest tokens at each target, computed once before the first step, and kept on disk by document.

    keys               [documents]          hashes of what documents hold
    starts             [documents + 1]      which targets are whose
    ids                [targets, K]         the teacher's likeliest tokens
    log_probabilities  [targets, K + 1]     of these, and of all others together

A file has as many documents as `_FILE_BYTES` have room for. What a batch needs is read of them by its place. So the
teacher is in no memory while the student trains, and memory has the keys alone.
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
from hfdist.tune.document_table import DocumentTable, Learn, places
from hfdist.tune.teacher import Teacher
from hfdist.units import size

logger = logging.getLogger(__name__)

_FILE_BYTES = 256 * 2**20
_OPEN_FILES = 64
"""The most files that a rank has open."""


class _Where(NamedTuple):
    """The targets of a document."""

    file: Path
    start: int
    stop: int


class KeptTeacher(DocumentTable):
    """Reads the teacher once, keeps its `task.teacher_top_k` likeliest tokens, and frees it.

    Args:
        folder: the folder in which they are kept.
        teacher: the teacher.
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
        """Where the targets of a document are, by its key; None: some rank has learned it, and it is not read yet."""
        self._learned: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Keys, tokens and log-probabilities that are not written yet."""
        self._open = lru_cache(_OPEN_FILES)(lambda path: safe_open(path, "np"))

    @property
    def num_documents(self) -> int:
        """See the base class."""
        return len(self._known)

    def begin(self, training: Training) -> None:
        """Compute what is not known yet of all steps and of the held-out sets. A collective.

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
        """Add the likeliest tokens of a batch's targets.

        Raises:
            CheckpointError: a document is not known, or a file is damaged.
        """
        shape = batch["labels"].shape
        ids = torch.zeros(*shape, self._count, dtype=torch.int32)
        logs = torch.zeros(*shape, self._count + 1)
        for row, start, stop, key in places(batch):
            where = self._known.get(key)
            is_target = batch["labels"][row, start + 1 : stop] != IGNORED
            if where is None or where.stop - where.start != int(is_target.sum()):
                what = "what the teacher says of a document is missing: the data have changed"
                raise CheckpointError(what, where=str(self._folder), hint="a new run.name")
            tokens = torch.nonzero(is_target)[:, 0] + start + 1
            ids[row, tokens], logs[row, tokens] = self._load(where)
        return batch | {TOP_IDS: ids, TOP_LOGS: logs}

    def rows(self, batch: Batch) -> AbstractContextManager[TeacherRows]:
        """Give what the teacher says of all tokens but the first of each row."""
        return nullcontext(top_rows(batch, beta=self._beta))

    def _load(self, where: _Where) -> tuple[torch.Tensor, torch.Tensor]:
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
        with self._training.waiting("the teacher reads the rows"), self._training.accelerator.autocast():
            yield self._learn
        self._teacher.free()

    def _learn(self, batch: Batch) -> bool:
        """Let the ranks of a model replica share the rows of a batch; see `Learn`."""
        found = list(places(batch))
        if not any(gather_json(any(place.key not in self._known for place in found))):
            return False
        topology, at_once = self._training.strategy.topology, self._training.strategy.batch.micro_batch_size
        mine = topology.pipeline_rank * topology.tensor + topology.rank % topology.tensor
        num_rows = len(batch["labels"])
        own = range(mine, num_rows, topology.model)
        # All ranks run equally many forwards, as they may have shards of the teacher.
        for first in range(0, -(-num_rows // topology.model), at_once):
            rows = list(own[first : first + at_once])
            part = {name: tensor[rows or [0]] for name, tensor in batch.items()}
            ids, logs = self._ask(part)
            if rows:
                self._take(part, ids, logs)
        for place in found:
            self._known.setdefault(place.key, None)
        on_all_ranks(self._write_if_full)
        return True

    def _ask(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Give the likeliest tokens [targets, K] and the log-probabilities [targets, K + 1] of a batch's targets."""
        moved = {name: tensor.to(self._training.args.device) for name, tensor in batch.items()}
        is_target = (moved["labels"][:, 1:] != IGNORED).flatten()
        with self._teacher.rows(moved) as taught:
            asked = taught.part(is_target)
            num_at_once = max(1, CHUNK_LOGITS[is_target.device.type] // TENSORS_OF_DIVERGENCE // self._vocabulary)
            # At least once: a slice of no rows has the right shape.
            parts = [
                likeliest(asked.part(slice(first, first + num_at_once)), self._vocabulary, self._count)
                for first in range(0, max(1, int(is_target.sum())), num_at_once)
            ]
        ids, logs = (torch.cat(of_parts).cpu().numpy() for of_parts in zip(*parts, strict=True))
        return ids, logs

    def _take(self, batch: Batch, ids: np.ndarray, logs: np.ndarray) -> None:
        """Note what was found of the documents of a batch."""
        first = 0
        for row, start, stop, key in places(batch):
            last = first + int((batch["labels"][row, start + 1 : stop] != IGNORED).sum())
            if key not in self._known:
                self._known[key] = None
                self._learned.append((key, ids[first:last], logs[first:last]))
            first = last
        assert first == len(ids), "the first token of a document is a target"

    def _write_if_full(self) -> None:
        if sum(len(ids) for _, ids, _ in self._learned) * top_bytes(self._count) >= _FILE_BYTES:
            self._write(self._training.strategy.topology.rank)

    def _write(self, rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        if not self._learned:
            return
        keys, ids, logs = zip(*self._learned, strict=True)
        self._learned = []
        columns = {
            "keys": np.array(keys, dtype=np.uint64),
            "starts": np.cumsum([0, *map(len, ids)], dtype=np.int64),
            "ids": np.concatenate(ids),
            "log_probabilities": np.concatenate(logs),
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
            num_targets = starts[-1] if starts[:1] == [0] else None
            is_whole = shapes == [[num_targets, self._count], [num_targets, self._count + 1]]
            if not is_whole or len(starts) != len(keys) + 1 or starts != sorted(starts):
                raise self._damaged(path)
            own = (_Where(path, *ends) for ends in pairwise(starts))
            self._known |= dict(zip(keys, own, strict=True))


def likeliest(teacher: WholeRows, vocabulary: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the likeliest tokens of each row, and log-probabilities of them and of all others together.

    Args:
        teacher: says how likely each token is.
        vocabulary: tokens of the student.
        count: number of tokens.

    Returns:
        Tokens, int32 of shape [rows, count], and log-probabilities of shape [rows, count + 1].
    """
    logs = teacher.log_probabilities(vocabulary)
    top, ids = logs.topk(count, -1)
    tail = logs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return ids.int(), torch.cat([top, tail], 1)
