"""The teacher of a distillation: a frozen model with the student's tokens, on each rank that computes losses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import islice

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from hfdist.config.paths import expand_user
from hfdist.config.task import Head, TaskConfig
from hfdist.errors import ConfigError
from hfdist.models.frozen import SAFELY, find_frozen, read_frozen, read_tokenizer
from hfdist.models.loss.distillation import asking
from hfdist.models.loss.teacher_rows import WholeRows
from hfdist.models.names.weight_names import read_names
from hfdist.models.position_limit import most_positions
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch
from hfdist.strategies.frozen import shard_frozen
from hfdist.trainer.training import Training
from hfdist.tune.fit_model import check_packable

_KEY = "task.teacher"
_ALLOWED = "the folder of a causal language model in safetensors, with the tokenizer of the model that is trained"
_HINT = f"{_KEY}=RUN/model, of a run without an adapter or with a merged one, or of what `hf download` has fetched"
_SHOWN = 2
"""Tokens that a message shows."""


def check_teacher(
    task: TaskConfig, tokenizer: PreTrainedTokenizerBase, student: PreTrainedConfig, *, sequence_length: int
) -> None:
    """Check the small files of a teacher, before there is a process group.

    Args:
        task: `task.*` of the run, which names the folder of the teacher.
        tokenizer: of the model that is trained.
        student: config of that model.
        sequence_length: tokens of a sequence.

    Raises:
        ConfigError: the folder holds no causal language model in safetensors, or one with other tokens, fewer tokens
            than the student, or too few positions; or it sees through from one packed document to the next. Or more
            of its likeliest tokens are to be kept than there are.
    """
    path = str(task.teacher)

    def refuse(what: str, found: object, allowed: str = _ALLOWED, hint: str = _HINT) -> ConfigError:
        return ConfigError(what, where=_KEY, found=f"{path}, {found}", allowed=allowed, hint=hint)

    config = find_frozen(path, where=_KEY, allowed=_ALLOWED, hint=_HINT)
    differ = _describe_difference(read_tokenizer(path, where=_KEY), tokenizer)
    if differ:
        raise refuse("the teacher has another tokenizer than the model that is trained", differ)
    taught, known = (one.get_text_config().vocab_size for one in (config, student))
    if taught < known:
        found = f"with {taught:,} rows of logits, and a student with {known:,}"
        hint = f"model.config.vocab_size={taught} for a model of random weights, or another task.teacher"
        raise refuse("the teacher says nothing of some tokens of the model that is trained", found, hint=hint)
    if task.teacher_top_k is not None and task.teacher_top_k > known:
        what, hint = "the model that is trained has fewer tokens", "task.teacher_top_k=64"
        where, allowed = "task.teacher_top_k", f"<= {known}"
        raise ConfigError(what, where=where, found=task.teacher_top_k, allowed=allowed, hint=hint)
    positions = most_positions(config)
    if positions is not None and positions < sequence_length:
        what, hint = "sequences are longer than the teacher has positions", f"data.sequence_length={positions}"
        found = f"with {positions:,}, and data.sequence_length={sequence_length}"
        raise refuse(what, found, f"data.sequence_length <= {positions}", hint)
    names = read_names(AutoModelForCausalLM, expand_user(path), where=_KEY, head=Head.tokens, **SAFELY)
    names.check(where=_KEY, name=path, hint=_HINT)
    with torch.device("meta"):
        check_packable(AutoModelForCausalLM.from_config(config, trust_remote_code=False), where=_KEY)


def _describe_difference(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase) -> str:
    """Say how the tokens of two tokenizers differ; empty: they are the same."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    others = [token for token in sorted({*ours, *theirs}) if ours.get(token) != theirs.get(token)]
    if not others:
        return ""
    shown = "; ".join(f"{t!r} is {theirs.get(t, 'none')}, not {ours.get(t, 'none')}" for t in islice(others, _SHOWN))
    return f"of {len(theirs):,} tokens, not {len(ours):,}; {len(others):,} differ: {shown}"


class Teacher:
    """The frozen model; it is read when the rank first needs it, and shared by ranks as `task.teacher_sharding` says.

    Args:
        task: `task.*` of the run; its teacher was checked by `check_teacher`.
        layout: layout in which the student is trained.
        arguments: arguments of the run.
    """

    def __init__(self, task: TaskConfig, *, layout: Strategy, arguments: TrainingArguments) -> None:
        self._task, self._layout, self._arguments = task, layout, arguments

    @cached_property
    def _model(self) -> PreTrainedModel:
        assert self._task.teacher is not None
        # What is kept of it is computed by all ranks together.
        by_all, sharding = self._task.teacher_top_k is not None, self._task.teacher_sharding
        return read_frozen(
            AutoModelForCausalLM,
            self._task.teacher,
            where=_KEY,
            layout=self._layout,
            arguments=self._arguments,
            shard=partial(shard_frozen, layout=self._layout, sharding=sharding, by_all=by_all),
        )

    def free(self) -> None:
        """Take the model out of memory, until it is needed again."""
        with suppress(AttributeError):  # it was not read
            del self._model
        # What FSDP2 has sharded refers to itself in a circle.
        gc.collect()

    def begin(self, training: Training) -> None:
        """Do nothing: what it says is computed when it is needed."""

    def prepare(self, batch: Batch) -> Batch:
        """Give the batch as it is."""
        return batch

    @contextmanager
    def rows(self, batch: Batch) -> Iterator[WholeRows]:
        """Give what it says of all tokens but the first of each row; in this context logits need not be whole."""
        # Only now: a rank that never comes here has no need of the model.
        with asking(self._model, batch, temperature=self._task.temperature, beta=self._task.divergence_beta) as rows:
            yield rows
