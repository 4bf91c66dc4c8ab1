"""Checks `task.*` against the rest of a config."""

from __future__ import annotations

import dataclasses
import json

from hfdist.config.checks.conflict import conflict, misfit
from hfdist.config.checks.reinforcement import check_reinforcement
from hfdist.config.data import LABELLED, LabelsConfig, Packing, PairsConfig, RowFormat, TextsConfig, TooLong, TrainOn
from hfdist.config.model import Attention
from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig
from hfdist.config.task import PRESETS, SCORE, TaskConfig, TaskLoss, TaskName
from hfdist.errors import ConfigError

_TASK_FORMATS = (
    RowFormat.preference, RowFormat.unpaired_preference, RowFormat.prompt, RowFormat.retrieval, RowFormat.scored_pair,
    RowFormat.source_target, *LABELLED,
)  # fmt: skip
"""Formats that no task of next tokens reads."""
_PROMPT_FORMATS = (RowFormat.prompt_completion, RowFormat.prompt)
"""Formats that a model answers."""
_SMOOTHED_LOSSES = (TaskLoss.robust, TaskLoss.exo_pair)
_SAMPLING_KEYS = ("max_new_tokens", "top_k", "top_p")
"""Keys of `task` that say how a model draws answers."""


def check_task(config: RunConfig) -> None:
    """Raise a ConfigError on what does not go with the task."""
    _check_keys_of_others(config)
    _check_rows(config)
    task, data = config.task, config.data
    alpha = TaskConfig().ref_model_mixup_alpha
    if task.ref_model_sync_steps is None and task.ref_model_mixup_alpha != alpha:
        error = misfit(config, "task.ref_model_mixup_alpha", f"{alpha:g}", "the reference stays as it is")
        error.hint = f"task.ref_model_sync_steps=512, or {error.hint}"
        raise error
    gives_labels = task.name.traits.head.gives_labels
    _check_section(config, "texts", TextsConfig(), is_read=gives_labels or task.name is TaskName.embed)
    _check_section(config, "labels", LabelsConfig(), is_read=gives_labels and task.name is not TaskName.rerank)
    _check_section(config, "pairs", PairsConfig(), is_read=task.name is TaskName.seq2seq)
    if data.keep_columns and not task.name.traits.is_reinforcement:
        raise misfit(config, "data.keep_columns", "false", "rewards alone read the other columns")
    if task.name is TaskName.causal_lm:
        return
    if task.name.traits.pads_documents:
        _check_padded_rows(config)
    elif not task.name.traits.has_teacher:
        _check_answers(config)
    if task.name.traits.losses:
        _check_loss(config)
    if config.strategy.context > 1:
        raise misfit(config, "strategy.context", "1", "each rank would see a part of a sequence")
    if config.islands.is_used:
        raise misfit(config, "islands.method", "none", "islands train next tokens only in this version")
    if task.name.traits.has_teacher:
        _check_teacher(config)
    elif task.name.traits.is_reinforcement:
        check_reinforcement(config)
    elif task.name is TaskName.embed:
        _check_embeddings(config)
    elif task.name is TaskName.reward:
        _check_reward_model(config)
    if "beta" in task.name.traits.keys and "clip" not in task.name.traits.keys:
        # The loss of a policy may do without a reference.
        _check_pairs(config)
    if not task.name.traits.writes_text or task.name.traits.hides_tokens:
        _check_without_text(config)


def _check_section(
    config: RunConfig, name: str, default: TextsConfig | LabelsConfig | PairsConfig, *, is_read: bool
) -> None:
    """Refuse a section of `data` that says something of rows which the task does not have."""
    section = getattr(config.data, name)
    if is_read or section == default:
        return
    key = next(f.name for f in dataclasses.fields(default) if getattr(section, f.name) != getattr(default, f.name))
    allowed = json.dumps(plain(getattr(default, key)))
    raise misfit(config, f"data.{name}.{key}", allowed, f"rows of this task have no such {name}")


def _check_answers(config: RunConfig) -> None:
    data = config.data
    is_whole = config.task.answers_prompts or config.task.name.traits.head.gives_labels
    packing = Packing.none if is_whole else Packing.best_fit
    if data.packing is not packing:
        raise misfit(config, "data.packing", packing.value, "prompts and answers must stay whole")
    if data.too_long is not TooLong.drop:
        raise misfit(config, "data.too_long", "drop", "prompts and answers must stay whole")
    if data.chat.train_on is TrainOn.all:
        raise misfit(config, "data.chat.train_on", "assistant", "it must be known where an answer begins")


def _check_padded_rows(config: RunConfig) -> None:
    """Refuse layouts that part a stack of blocks, what would cut rows, and figures that nothing measures."""
    data, task = config.data, config.task
    why = "an encoder-decoder has two stacks of blocks, and this parts one"
    if task.name is TaskName.mlm:
        why = "the head and the blocks of an encoder are not parted in this version"
    for key in ("pipeline", "tensor", "expert"):
        if getattr(config.strategy, key) > 1:
            raise misfit(config, f"strategy.{key}", "1", why)
    if config.model.attention is Attention.varlen:
        raise misfit(config, "model.attention", "auto", "each document is a padded row, in which there is one")
    if task.name is TaskName.seq2seq:
        if data.packing is not Packing.none:
            why = "relative positions and the attention to sources know no borders, so that a row stands by itself"
            raise misfit(config, "data.packing", "none", why)
        if data.too_long is not TooLong.drop:
            error = misfit(config, "data.too_long", "drop", "sources and targets must stay whole")
            error.hint = f"{error.hint}; data.pairs.max_source_tokens and max_target_tokens cut them"
            raise error
        if config.evaluate.lm_eval:
            raise misfit(config, "evaluate.lm_eval", "[]", "the harness asks for the next tokens of a text")
    # Written with six digits, shares of 1 may add up to a little more.
    if task.mask_replace_prob + task.random_replace_prob > 1 + 1e-6:
        what, where = "these are shares of the same tokens", "task.mask_replace_prob, task.random_replace_prob"
        found = f"{task.mask_replace_prob:g} + {task.random_replace_prob:g}"
        hint = f"task.random_replace_prob={1 - task.mask_replace_prob:g}"
        raise ConfigError(what, where=where, found=found, allowed="a sum of 1 at the most", hint=hint)


def _check_loss(config: RunConfig) -> None:
    task = config.task
    known = [loss.value for loss in task.name.traits.losses]
    if task.loss.value not in known:
        error = misfit(config, "task.loss", known[0], f"this task has other losses: {', '.join(known)}")
        if task.loss.value in PRESETS:
            error.hint = f"task={task.loss.value}, or {error.hint}"
        raise error


def _check_teacher(config: RunConfig) -> None:
    if config.task.teacher is None:
        what, hint = "it is not said which model teaches", "task.teacher=RUN/model, or another folder of a model"
        allowed = "the folder of a model with the same tokens"
        raise conflict(config, "task.teacher", what, allowed=allowed, hint=hint)
    if config.task.on_policy:
        _check_answers(config)
        if config.task.teacher_top_k is not None:
            why = "a teacher that is kept has not seen the answers that the model draws: task.on_policy"
            raise misfit(config, "task.teacher_top_k", "null", why)
        return
    for key in _SAMPLING_KEYS:
        allowed = plain(getattr(TaskConfig(), key))
        if getattr(config.task, key) != allowed:
            why = "the model draws no answers, as task.on_policy=0"
            raise misfit(config, f"task.{key}", json.dumps(allowed), why)


def _check_keys_of_others(config: RunConfig) -> None:
    """Refuse keys of other tasks, which would be ignored."""
    default = TaskConfig()
    for field in dataclasses.fields(TaskConfig):
        key = field.name
        is_own = key == "name" or key in config.task.name.traits.keys
        if not is_own and getattr(config.task, key) != getattr(default, key):
            allowed = json.dumps(plain(getattr(default, key)))
            error = misfit(config, f"task.{key}", allowed, "this task has no use for the key")
            # A mapping is added to, so that an empty one changes nothing.
            error.hint = f"leave task.{key} out" if key == "rewards" else error.hint
            raise error


def _check_rows(config: RunConfig) -> None:
    """Check that rows have the format of the task; a task of next tokens reads the formats that no other task has."""
    wanted = config.task.row_format
    for key, found in config.data.formats.items():
        if config.task.name.traits.is_reinforcement:
            fits, allowed = found in _PROMPT_FORMATS, " or ".join(one.value for one in _PROMPT_FORMATS)
        elif wanted is not None:
            fits, allowed = found is wanted, wanted.value
        elif config.task.on_policy:
            # Prompts alone have no answers for the other steps.
            is_prompt = found is RowFormat.prompt and config.task.on_policy == 1
            fits = is_prompt or found not in (*_TASK_FORMATS, RowFormat.text)
            allowed = "prompt_completion, or another with prompts; prompt with task.on_policy=1"
        else:
            fits, allowed = found not in _TASK_FORMATS, "another format, or hfdist tune"
        if not fits:
            what, task = "the task needs rows of another format", f"task.name={config.task.name.value}"
            is_of_others = wanted is None and found in _TASK_FORMATS
            hint = f"{key}={RowFormat.auto.value if is_of_others else allowed.partition(' ')[0].rstrip(',')}"
            raise ConfigError(what, where=key, found=f"{found.value}, with {task}", allowed=allowed, hint=hint)


def _check_pairs(config: RunConfig) -> None:
    task, name = config.task, config.task.name
    if task.label_smoothing and task.loss not in _SMOOTHED_LOSSES:
        error = misfit(config, "task.label_smoothing", "0", "only robust and exo_pair, losses of dpo, smooth labels")
        if TaskLoss.robust in name.traits.losses:
            error.hint = f"task.loss=robust, or {error.hint}"
        raise error
    if task.loss is TaskLoss.exo_pair and not task.label_smoothing:
        raise misfit(config, "task.label_smoothing", "0.001", "exo_pair compares with smoothed labels")
    if task.margin and task.loss is not TaskLoss.simpo:
        raise misfit(config, "task.margin", "0", "only simpo has a margin")
    if not task.beta:
        raise misfit(config, "task.beta", "0.1", "without it the answers would not count")


def _check_reward_model(config: RunConfig) -> None:
    adapter = config.adapter
    if adapter.is_used and SCORE not in adapter.modules_to_save:
        why = "the layer that scores is new: it must be trained"
        raise misfit(config, "adapter.modules_to_save", f"[{SCORE}]", why)
    if adapter.is_used and adapter.merge:
        raise misfit(config, "adapter.merge", "false", "a reward model is not merged in this version")


def _check_without_text(config: RunConfig) -> None:
    why = "the model writes no answers" if config.task.name.traits.writes_text else "the model writes no text"
    for key in ("evaluate.prompts", "evaluate.metrics", "evaluate.lm_eval"):
        if getattr(config.evaluate, key.partition(".")[2]):
            raise misfit(config, key, "[]", why)
    if config.report.sample_prompt is not None:
        raise misfit(config, "report.sample_prompt", "null", why)


def _check_embeddings(config: RunConfig) -> None:
    task, most = config.task, config.data.texts.max_tokens
    if task.loss is TaskLoss.triplet and not task.margin:
        raise misfit(config, "task.margin", "0.2", "a triplet compares distances with a margin")
    if task.loss is not TaskLoss.triplet and task.margin:
        raise misfit(config, "task.margin", "0", "only triplet has a margin")
    if task.loss is TaskLoss.triplet and task.scale != TaskConfig.scale:
        raise misfit(config, "task.scale", str(TaskConfig.scale), "triplet compares distances as they are")
    if task.loss is TaskLoss.triplet and task.mask_duplicates:
        raise misfit(config, "task.mask_duplicates", "false", "triplet compares a query with its own negatives alone")
    if task.loss is TaskLoss.cosent and task.mask_duplicates:
        raise misfit(config, "task.mask_duplicates", "false", "cosent compares pairs by their scores alone")
    if any(size < 1 for size in task.matryoshka) or len(set(task.matryoshka)) < len(task.matryoshka):
        what, allowed = "these are no sizes of an embedding", "numbers of dimensions above 0, each once"
        raise conflict(config, "task.matryoshka", what, allowed=allowed, hint="task.matryoshka=[64,128,256]")
    half = config.data.sequence_length // 2
    if most is not None and most > half:
        what, keys = "a query and its positive must fit into one sequence", "data.texts.max_tokens data.sequence_length"
        raise conflict(config, keys, what, allowed=f"<= {half}", hint=f"data.texts.max_tokens={half}")
