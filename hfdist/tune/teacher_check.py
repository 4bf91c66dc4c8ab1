"""The check that a model can be the teacher of a distillation, by the small files of its folder alone."""

from __future__ import annotations

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
"""The most differing tokens that a message shows."""


def check_teacher(
    task: TaskConfig, tokenizer: PreTrainedTokenizerBase, student: PreTrainedConfig, *, sequence_length: int
) -> None:
    """Check the small files of a teacher, before there is a process group.

    Args:
        task: `task.*` of the run, which names the folder of the teacher.
        tokenizer: tokenizer of the model that is trained.
        student: config of the model that is trained.
        sequence_length: tokens of a sequence.

    Raises:
        ConfigError: the folder holds no causal language model in safetensors, or one with other tokens, fewer tokens
            than the student, or too few positions; or attention of the teacher goes from one packed document to the
            next. Or `task.teacher_top_k` is above the number of tokens.
    """
    path = str(task.teacher)
    config = find_frozen(path, where=_KEY, allowed=_ALLOWED, hint=_HINT)
    difference = _describe_difference(read_tokenizer(path, where=_KEY), tokenizer)
    if difference:
        raise _unfit("the teacher has another tokenizer than the model that is trained", f"{path}, {difference}")
    _check_vocabulary(task, config, student)
    positions = most_positions(config)
    if positions is not None and positions < sequence_length:
        raise _unfit(
            "sequences are longer than the teacher has positions",
            f"{path}, with {positions:,}, and data.sequence_length={sequence_length}",
            allowed=f"data.sequence_length <= {positions}",
            hint=f"data.sequence_length={positions}",
        )
    names = read_names(AutoModelForCausalLM, expand_user(path), where=_KEY, head=Head.tokens, **SAFELY)
    names.check(where=_KEY, name=path, hint=_HINT)
    # On the meta device a model has shapes and no weights.
    with torch.device("meta"):
        check_packable(AutoModelForCausalLM.from_config(config, trust_remote_code=False), where=_KEY)


def _check_vocabulary(task: TaskConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    num_taught, num_known = teacher.get_text_config().vocab_size, student.get_text_config().vocab_size
    if num_taught < num_known:
        raise _unfit(
            "the teacher says nothing of some tokens of the model that is trained",
            f"{task.teacher}, with {num_taught:,} rows of logits, and a student with {num_known:,}",
            hint=f"model.config.vocab_size={num_taught} for a model of random weights, or another task.teacher",
        )
    if task.teacher_top_k is not None and task.teacher_top_k > num_known:
        raise ConfigError(
            "the model that is trained has fewer tokens",
            where="task.teacher_top_k",
            found=task.teacher_top_k,
            allowed=f"<= {num_known}",
            hint="task.teacher_top_k=64",
        )


def _unfit(what: str, found: str, *, allowed: str = _ALLOWED, hint: str = _HINT) -> ConfigError:
    """Make the error of a teacher that does not fit the student."""
    return ConfigError(what, where=_KEY, found=found, allowed=allowed, hint=hint)


def _describe_difference(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase) -> str:
    """Say how the tokens of two tokenizers differ; "": they are the same."""
    known, taught = student.get_vocab(), teacher.get_vocab()
    differing = [token for token in sorted({*known, *taught}) if known.get(token) != taught.get(token)]
    if not differing:
        return ""
    shown = "; ".join(
        f"{token!r} is {taught.get(token, 'none')}, not {known.get(token, 'none')}" for token in differing[:_SHOWN]
    )
    return f"of {len(taught):,} tokens, not {len(known):,}; {len(differing):,} differ: {shown}"
