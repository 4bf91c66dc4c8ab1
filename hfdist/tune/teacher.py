"""The teacher of a distillation: a frozen model with the student's tokens, on each rank that computes losses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial

from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from hfdist.config.task import TaskConfig
from hfdist.models.frozen import read_frozen
from hfdist.models.loss.distillation import asking
from hfdist.models.loss.teacher_rows import WholeRows
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch
from hfdist.strategies.frozen import shard_frozen
from hfdist.trainer.training import Training


class Teacher:
    """The frozen teacher; a rank reads it when it first needs it, and ranks share it as `task.teacher_sharding` says.

    Args:
        task: `task.*` of the run, whose teacher was checked by `check_teacher`.
        layout: layout in which the student is trained.
        arguments: arguments of the run.
    """

    def __init__(self, task: TaskConfig, *, layout: Strategy, arguments: TrainingArguments) -> None:
        self._task, self._layout, self._arguments = task, layout, arguments

    @cached_property
    def _model(self) -> PreTrainedModel:
        assert self._task.teacher is not None
        shard = partial(
            shard_frozen,
            layout=self._layout,
            sharding=self._task.teacher_sharding,
            # All ranks together compute the likeliest tokens that are kept; else those that compute losses read it.
            by_all=self._task.teacher_top_k is not None,
        )
        return read_frozen(
            AutoModelForCausalLM,
            self._task.teacher,
            where="task.teacher",
            layout=self._layout,
            arguments=self._arguments,
            shard=shard,
        )

    def free(self) -> None:
        """Take the model out of memory, until it is needed again."""
        with suppress(AttributeError):  # the model was never read
            del self._model
        # What FSDP2 has sharded refers to itself in a circle.
        gc.collect()

    def begin(self, training: Training) -> None:
        """Do nothing: the teacher reads each batch when its loss is computed."""

    def prepare(self, batch: Batch) -> Batch:
        """Give the batch as it is: nothing was computed before."""
        return batch

    @contextmanager
    def rows(self, batch: Batch) -> Iterator[WholeRows]:
        """Give what the teacher says of all tokens but the first of each row of a batch.

        In this context the teacher's logits need not be whole: they may exist for some rows at a time.
        """
        # Only now: a rank that never comes here has no need of the model.
        with asking(self._model, batch, temperature=self._task.temperature, beta=self._task.divergence_beta) as rows:
            yield rows
