"""Whether a model can teach the one that is trained, by the small files of its folder alone."""

from __future__ import annotations

from itertools import islice

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.paths import expand_user
from hfdist.config.task import Head, TaskConfig
from hfdist.errors import ConfigError
from hfdist.models.frozen import SAFELY, find_frozen, read_tokenizer
from hfdist.models.names.weight_names import read_names
from hfdist.models.position_limit import most_positions
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
