"""Checks `task.*` against the rest of a config."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import reduce

from hfdist.config.checks.servers import check_servers
from hfdist.config.data import LABELLED, LabelsConfig, Packing, PairsConfig, RowFormat, TextsConfig, TooLong, TrainOn
from hfdist.config.model import Attention
from hfdist.config.plain_values import override_value, plain
from hfdist.config.run import RunConfig
from hfdist.config.task import ANSWER_LIMIT, ENVIRONMENT, PRESETS, REWARD_MODEL, SCORE, TaskConfig, TaskLoss, TaskName
from hfdist.errors import ConfigError

_OF_TASKS = (
    RowFormat.preference,
    RowFormat.unpaired_preference,
    RowFormat.prompt,
    RowFormat.retrieval,
    RowFormat.scored_pair,
    RowFormat.source_target,
    *LABELLED,
)
_WITH_REFERENCE = ("arithmetic", "code", "code_without_landlock")
"""Rewards that compare an answer with the data's."""
_OF_REFERENCE = ("code", "guess", "reasoning_gym")
"""Environments that read the data's answer."""
_SMOOTHED = (TaskLoss.robust, TaskLoss.exo_pair)
_WITHOUT_BOUND = {
    TaskLoss.cispo: ("clip", "delta"),
    **dict.fromkeys((TaskLoss.sapo, TaskLoss.vespo), ("clip", "clip_high", "delta")),
}
_OF_PROMPTS = (RowFormat.prompt_completion, RowFormat.prompt)
_OF_OWN_ANSWERS = ("max_new_tokens", "top_k", "top_p")


def check_task(config: RunConfig) -> None:
    """Raise a ConfigError on what does not go with the task."""
    _check_others(config)
    _check_rows(config)
    task, data = config.task, config.data
    alpha = TaskConfig().ref_model_mixup_alpha
    if task.ref_model_sync_steps is None and task.ref_model_mixup_alpha != alpha:
        error = _misfit(config, "task.ref_model_mixup_alpha", f"{alpha:g}", "the reference stays as it is")
        error.hint = f"task.ref_model_sync_steps=512, or {error.hint}"
        raise error
    gives_labels = task.name.traits.head.gives_labels
    _check_section(config, "texts", TextsConfig(), is_read=gives_labels or task.name is TaskName.embed)
    _check_section(config, "labels", LabelsConfig(), is_read=gives_labels and task.name is not TaskName.rerank)
    _check_section(config, "pairs", PairsConfig(), is_read=task.name is TaskName.seq2seq)
    if data.keep_columns and not task.name.traits.is_reinforcement:
        raise _misfit(config, "data.keep_columns", "false", "rewards alone read the other columns")
    if task.name is TaskName.causal_lm:
        return
    if task.name.traits.pads_documents:
        _check_padded_rows(config)
    elif not task.name.traits.has_teacher:
        _check_answers(config)
    if task.name.traits.losses:
        _check_loss(config)
    if config.strategy.context > 1:
        raise _misfit(config, "strategy.context", "1", "each rank would see a part of a sequence")
    if config.islands.is_used:
        raise _misfit(config, "islands.method", "none", "islands train next tokens only in this version")
    if task.name.traits.has_teacher:
        _check_teacher(config)
    elif task.name.traits.is_reinforcement:
        _check_reinforcement(config)
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
    raise _misfit(config, f"data.{name}.{key}", allowed, f"rows of this task have no such {name}")


def _check_answers(config: RunConfig) -> None:
    data = config.data
    is_whole = config.task.answers_prompts or config.task.name.traits.head.gives_labels
    packing = Packing.none if is_whole else Packing.best_fit
    if data.packing is not packing:
        raise _misfit(config, "data.packing", packing.value, "prompts and answers must stay whole")
    if data.too_long is not TooLong.drop:
        raise _misfit(config, "data.too_long", "drop", "prompts and answers must stay whole")
    if data.chat.train_on is TrainOn.all:
        raise _misfit(config, "data.chat.train_on", "assistant", "it must be known where an answer begins")


def _check_padded_rows(config: RunConfig) -> None:
    """Refuse layouts that part a stack of blocks, what would cut rows, and figures that nothing measures."""
    data, task = config.data, config.task
    why = "an encoder-decoder has two stacks of blocks, and this parts one"
    if task.name is TaskName.mlm:
        why = "the head and the blocks of an encoder are not parted in this version"
    for key in ("pipeline", "tensor", "expert"):
        if getattr(config.strategy, key) > 1:
            raise _misfit(config, f"strategy.{key}", "1", why)
    if config.model.attention is Attention.varlen:
        raise _misfit(config, "model.attention", "auto", "each document is a padded row, in which there is one")
    if task.name is TaskName.seq2seq:
        if data.packing is not Packing.none:
            why = "relative positions and the attention to sources know no borders, so that a row stands by itself"
            raise _misfit(config, "data.packing", "none", why)
        if data.too_long is not TooLong.drop:
            error = _misfit(config, "data.too_long", "drop", "sources and targets must stay whole")
            error.hint = f"{error.hint}; data.pairs.max_source_tokens and max_target_tokens cut them"
            raise error
        if config.evaluate.lm_eval:
            raise _misfit(config, "evaluate.lm_eval", "[]", "the harness asks for the next tokens of a text")
    # Written with six digits, shares of 1 may add up to a little more.
    if task.mask_replace_prob + task.random_replace_prob > 1 + 1e-6:
        raise ConfigError(
            "these are shares of the same tokens",
            where="task.mask_replace_prob, task.random_replace_prob",
            found=f"{task.mask_replace_prob:g} + {task.random_replace_prob:g}",
            allowed="a sum of 1 at the most",
            hint=f"task.random_replace_prob={1 - task.mask_replace_prob:g}",
        )


def _check_loss(config: RunConfig) -> None:
    task = config.task
    known = [loss.value for loss in task.name.traits.losses]
    if task.loss.value not in known:
        error = _misfit(config, "task.loss", known[0], f"this task has other losses: {', '.join(known)}")
        if task.loss.value in PRESETS:
            error.hint = f"task={task.loss.value}, or {error.hint}"
        raise error


def _check_teacher(config: RunConfig) -> None:
    if config.task.teacher is None:
        what, hint = "it is not said which model teaches", "task.teacher=RUN/model, or another folder of a model"
        allowed = "the folder of a model with the same tokens"
        raise ConfigError(what, where="task.teacher", found="null", allowed=allowed, hint=hint)
    if config.task.on_policy:
        _check_answers(config)
        if config.task.teacher_top_k is not None:
            why = "a teacher that is kept has not seen the answers that the model draws: task.on_policy"
            raise _misfit(config, "task.teacher_top_k", "null", why)
        return
    for key in _OF_OWN_ANSWERS:
        allowed = plain(getattr(TaskConfig(), key))
        if getattr(config.task, key) != allowed:
            why = "the model draws no answers, as task.on_policy=0"
            raise _misfit(config, f"task.{key}", json.dumps(allowed), why)


def _check_others(config: RunConfig) -> None:
    """Refuse what says something of another task: it would be ignored."""
    default = TaskConfig()
    for field in dataclasses.fields(TaskConfig):
        key = field.name
        is_own = key == "name" or key in config.task.name.traits.keys
        if not is_own and getattr(config.task, key) != getattr(default, key):
            allowed = json.dumps(plain(getattr(default, key)))
            error = _misfit(config, f"task.{key}", allowed, "this task has no use for the key")
            # A mapping is added to, so that an empty one changes nothing.
            error.hint = f"leave task.{key} out" if key == "rewards" else error.hint
            raise error


def _misfit(config: RunConfig, key: str, allowed: str, why: str) -> ConfigError:
    found = override_value(plain(reduce(getattr, key.split("."), config)))
    task = f"task.name={config.task.name.value}"
    return ConfigError(why, where=key, found=f"{found}, with {task}", allowed=allowed, hint=f"{key}={allowed}")


def _formats(config: RunConfig) -> dict[str, RowFormat]:
    """Give the format of the rows of each source, by the key that says it."""
    data = config.data
    by_source = {f"{key}.format": source.format or data.format for key, source in data.all_sources.items()}
    return {"data.format": data.format, **by_source}


def _check_rows(config: RunConfig) -> None:
    """Check that rows have the format of the task; a task of next tokens reads the formats that no other task has."""
    wanted = config.task.row_format
    for key, found in _formats(config).items():
        if config.task.name.traits.is_reinforcement:
            fits, allowed = found in _OF_PROMPTS, " or ".join(one.value for one in _OF_PROMPTS)
        elif wanted is not None:
            fits, allowed = found is wanted, wanted.value
        elif config.task.on_policy:
            # Prompts alone have no answers for the other steps.
            is_prompt = found is RowFormat.prompt and config.task.on_policy == 1
            fits = is_prompt or found not in (*_OF_TASKS, RowFormat.text)
            allowed = "prompt_completion, or another with prompts; prompt with task.on_policy=1"
        else:
            fits, allowed = found not in _OF_TASKS, "another format, or hfdist tune"
        if not fits:
            what, task = "the task needs rows of another format", f"task.name={config.task.name.value}"
            hint = f"{key}={'auto' if wanted is None and found in _OF_TASKS else allowed.partition(' ')[0].rstrip(',')}"
            raise ConfigError(what, where=key, found=f"{found.value}, with {task}", allowed=allowed, hint=hint)


def _check_pairs(config: RunConfig) -> None:
    task, name = config.task, config.task.name
    if task.label_smoothing and task.loss not in _SMOOTHED:
        error = _misfit(config, "task.label_smoothing", "0", "only robust and exo_pair, losses of dpo, smooth labels")
        if TaskLoss.robust in name.traits.losses:
            error.hint = f"task.loss=robust, or {error.hint}"
        raise error
    if task.loss is TaskLoss.exo_pair and not task.label_smoothing:
        raise _misfit(config, "task.label_smoothing", "0.001", "exo_pair compares with smoothed labels")
    if task.margin and task.loss is not TaskLoss.simpo:
        raise _misfit(config, "task.margin", "0", "only simpo has a margin")
    if not task.beta:
        raise _misfit(config, "task.beta", "0.1", "without it the answers would not count")


def _check_reward_model(config: RunConfig) -> None:
    adapter = config.adapter
    if adapter.is_used and SCORE not in adapter.modules_to_save:
        raise _misfit(
            config, "adapter.modules_to_save", f"[{SCORE}]", "the layer that scores is new: it must be trained"
        )
    if adapter.is_used and adapter.merge:
        raise _misfit(config, "adapter.merge", "false", "a reward model is not merged in this version")


def _check_without_text(config: RunConfig) -> None:
    why = "the model writes no answers" if config.task.name.traits.writes_text else "the model writes no text"
    for key in ("evaluate.prompts", "evaluate.metrics", "evaluate.lm_eval"):
        if getattr(config.evaluate, key.partition(".")[2]):
            raise _misfit(config, key, "[]", why)
    if config.report.sample_prompt is not None:
        raise _misfit(config, "report.sample_prompt", "null", why)


def _check_embeddings(config: RunConfig) -> None:
    task, most = config.task, config.data.texts.max_tokens
    if task.loss is TaskLoss.triplet and not task.margin:
        raise _misfit(config, "task.margin", "0.2", "a triplet compares distances with a margin")
    if task.loss is not TaskLoss.triplet and task.margin:
        raise _misfit(config, "task.margin", "0", "only triplet has a margin")
    if task.loss is TaskLoss.triplet and task.scale != TaskConfig.scale:
        raise _misfit(config, "task.scale", str(TaskConfig.scale), "triplet compares distances as they are")
    if task.loss is TaskLoss.triplet and task.mask_duplicates:
        raise _misfit(config, "task.mask_duplicates", "false", "triplet compares a query with its own negatives alone")
    if task.loss is TaskLoss.cosent and task.mask_duplicates:
        raise _misfit(config, "task.mask_duplicates", "false", "cosent compares pairs by their scores alone")
    if any(size < 1 for size in task.matryoshka) or len(set(task.matryoshka)) < len(task.matryoshka):
        allowed = "numbers of dimensions above 0, each once"
        hint = "task.matryoshka=[64,128,256]"
        raise ConfigError(
            "these are no sizes of an embedding",
            where="task.matryoshka",
            found=str(task.matryoshka),
            allowed=allowed,
            hint=hint,
        )
    if most is not None and 2 * most > config.data.sequence_length:
        raise ConfigError(
            "a query and its positive must fit into one sequence",
            where="data.texts.max_tokens",
            found=f"{most}, with data.sequence_length={config.data.sequence_length}",
            allowed=f"<= {config.data.sequence_length // 2}",
            hint=f"data.texts.max_tokens={config.data.sequence_length // 2}",
        )


def _check_reinforcement(config: RunConfig) -> None:
    _check_rewards(config)
    _check_environment(config)
    has_values = config.task.name.traits.has_values
    if config.task.num_generations == 1 and not has_values:
        raise _misfit(config, "task.num_generations", "2", "answers to one prompt are compared with each other")
    if has_values and config.strategy.sequence:
        raise _misfit(config, "strategy.sequence", "false", "a head of values reads all tokens of a row")
    for key in _WITHOUT_BOUND.get(config.task.loss, ()):
        allowed = TaskConfig().delta if key == "delta" else None
        if getattr(config.task, key) != allowed:
            why = f"{config.task.loss.value} has no such bound of ratios"
            raise _misfit(config, f"task.{key}", json.dumps(allowed), why)
    if config.task.ref_model_sync_steps is not None and not config.task.beta:
        error = _misfit(config, "task.ref_model_sync_steps", "null", "without task.beta there is no reference")
        error.hint = f"task.beta=0.1, or {error.hint}"
        raise error
    trained, read = config.task.trained_prompts, config.train.global_batch_size
    if trained is not None and trained > read:
        raise ConfigError(
            "a step cannot train on more prompts than it reads",
            where="task.trained_prompts",
            found=f"{trained:,}, with train.global_batch_size={read:,}",
            allowed="<= train.global_batch_size",
            hint=f"task.trained_prompts={read}, or a larger train.global_batch_size",
        )
    _check_generators(config)
    check_servers(config)


def _check_rewards(config: RunConfig) -> None:
    if config.task.reward_model is not None and REWARD_MODEL not in config.task.rewards:
        what, hint = "the reward model has no weight", f"'task.rewards={{{REWARD_MODEL}: 1.0}}'"
        found = ", ".join(config.task.rewards) or "none"
        raise ConfigError(what, where="task.rewards", found=found, allowed=f"{{{REWARD_MODEL}: WEIGHT}}", hint=hint)
    if not config.task.rewards:
        what, hint = "answers need a reward", "'task.rewards={arithmetic: 1.0}'"
        if RowFormat.prompt in _formats(config).values():
            hint = f"data.format=prompt_completion {hint}"
        hint += "; docs/rewards.md has others, and how to write one"
        known = ", ".join((*_WITH_REFERENCE, "overlong", REWARD_MODEL, ENVIRONMENT))
        allowed = f"{{NAME: WEIGHT}}, of {known}, or of a package of your own"
        raise ConfigError(what, where="task.rewards", found="none", allowed=allowed, hint=hint)
    compared = [name for name in config.task.rewards if name in _WITH_REFERENCE]
    if compared and RowFormat.prompt in _formats(config).values():
        what = "this reward compares an answer with the data's, and prompts alone have none"
        hint = "data.format=prompt_completion 'data.columns={completion: answer}', or a reward of your own"
        found = f"{compared[0]}, with format prompt"
        raise ConfigError(what, where="task.rewards, data.format", found=found, hint=hint)
    if REWARD_MODEL in config.task.rewards and config.task.reward_model is None:
        what, allowed = "it is not said which model gives this reward", "the folder of a reward model"
        hint = "task.reward_model=RUN/model, of a run that trains a reward model"
        raise ConfigError(what, where="task.reward_model", found="null", allowed=allowed, hint=hint)


def _check_generators(config: RunConfig) -> None:
    if config.task.off_policy_mask_threshold is not None and not config.task.uses_generators:
        why = "answers within the step are of the policy that it trains: none is far from it; task.generators has older"
        error = _misfit(config, "task.off_policy_mask_threshold", "null", why)
        error.hint = f"task.generators=1, or {error.hint}"
        raise error
    if config.task.generators_host is not None and config.task.generators_port is None:
        what, hint = "nobody is let in at this address without a port", "task.generators_port=29700"
        raise ConfigError(what, where="task.generators_port", found="null", allowed="a port", hint=hint)
    if config.task.generators_port is not None and config.model.trust_remote_code:
        what = "generators of other machines do not run a model's own Python code"
        hint = "task.generators_port=null, or model.trust_remote_code=false"
        raise ConfigError(what, where="model.trust_remote_code", found="true", allowed="false", hint=hint)
    if config.task.uses_generators and config.task.sync_every > config.task.max_staleness + 1:
        raise ConfigError(
            "generators would wait for a policy that they do not get, and the run for their answers",
            where="task.sync_every",
            found=f"{config.task.sync_every}, with task.max_staleness={config.task.max_staleness}",
            allowed="<= task.max_staleness + 1",
            hint=f"task.max_staleness={config.task.sync_every - 1}",
        )


def _check_environment(config: RunConfig) -> None:
    task, default = config.task, TaskConfig()
    if task.environment is None:
        for key in ("environment_url", "environment_seconds", "max_turns"):
            if getattr(task, key) != getattr(default, key):
                allowed = json.dumps(getattr(default, key))
                raise _misfit(config, f"task.{key}", allowed, "without an environment a prompt has one answer")
        if ENVIRONMENT in task.rewards:
            what, hint = "there is no environment that gives this reward", "task.environment=guess, or another one"
            if "environment" not in task.name.traits.keys:
                hint = f"task=grpo {hint}"
            raise ConfigError(what, where="task.rewards", found=ENVIRONMENT, hint=hint)
        return
    if task.uses_generators and task.answer_seconds < task.environment_seconds:
        raise ConfigError(
            "a prompt would go to another generator while its environment may still answer",
            where="task.answer_seconds",
            found=f"{task.answer_seconds:g}, with task.environment_seconds={task.environment_seconds:g}",
            allowed=">= task.environment_seconds",
            hint=f"task.answer_seconds={min(task.max_turns * task.environment_seconds, ANSWER_LIMIT):g}",
        )
    if task.environment in _OF_REFERENCE and RowFormat.prompt in _formats(config).values():
        what = "this environment needs the completion of the row, and prompts alone have none"
        found, hint = f"{task.environment}, with format prompt", "data.format=prompt_completion"
        raise ConfigError(what, where="task.environment, data.format", found=found, hint=hint)
    is_open = task.environment == "openenv"
    if is_open and re.fullmatch(r"wss?://[^/\s]+(/\S*)?", task.environment_url or "") is None:
        what, allowed = "it is not said where the server is", "ws://HOST:PORT/PATH, or wss://"
        found = json.dumps(task.environment_url)
        raise ConfigError(
            what, where="task.environment_url", found=found, allowed=allowed,
            hint="task.environment_url=ws://127.0.0.1:8000/ws",
        )  # fmt: skip
    if not is_open and task.environment_url is not None:
        raise _misfit(config, "task.environment_url", "null", f"only openenv has a server, not {task.environment}")
