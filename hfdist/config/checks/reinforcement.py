"""Checks of tasks whose model answers prompts: rewards, generators, environments."""

from __future__ import annotations

import json
import re

from hfdist.config.checks.conflict import conflict, misfit
from hfdist.config.checks.servers import check_servers
from hfdist.config.data import RowFormat
from hfdist.config.ranges import DAY_SECONDS
from hfdist.config.run import RunConfig
from hfdist.config.task import ENVIRONMENT, REWARD_MODEL, TaskConfig, TaskLoss
from hfdist.errors import ConfigError

_COMPARING_REWARDS = ("arithmetic", "code", "code_without_landlock")
"""Rewards that compare an answer with the data's."""
_COMPARING_ENVIRONMENTS = ("code", "guess", "reasoning_gym")
"""Environments that read the data's answer."""
_UNUSED_BOUNDS = {
    TaskLoss.cispo: ("clip", "delta"),
    **dict.fromkeys((TaskLoss.sapo, TaskLoss.vespo), ("clip", "clip_high", "delta")),
}
"""Keys of `task` that bound ratios, but not in these losses."""


def check_reinforcement(config: RunConfig) -> None:
    """Raise a ConfigError on rewards, generators and environments that do not go together."""
    _check_rewards(config)
    _check_environment(config)
    has_values = config.task.name.traits.has_values
    if config.task.num_generations == 1 and not has_values:
        raise misfit(config, "task.num_generations", "2", "answers to one prompt are compared with each other")
    if has_values and config.strategy.sequence:
        raise misfit(config, "strategy.sequence", "false", "a head of values reads all tokens of a row")
    for key in _UNUSED_BOUNDS.get(config.task.loss, ()):
        allowed = TaskConfig().delta if key == "delta" else None
        if getattr(config.task, key) != allowed:
            why = f"{config.task.loss.value} has no such bound of ratios"
            raise misfit(config, f"task.{key}", json.dumps(allowed), why)
    if config.task.ref_model_sync_steps is not None and not config.task.beta:
        error = misfit(config, "task.ref_model_sync_steps", "null", "without task.beta there is no reference")
        error.hint = f"task.beta=0.1, or {error.hint}"
        raise error
    trained, read = config.task.trained_prompts, config.train.global_batch_size
    if trained is not None and trained > read:
        what, keys = "a step cannot train on more prompts than it reads", "task.trained_prompts train.global_batch_size"
        hint = f"task.trained_prompts={read}, or a larger train.global_batch_size"
        raise conflict(config, keys, what, allowed="<= train.global_batch_size", hint=hint)
    _check_generators(config)
    check_servers(config)


def _check_rewards(config: RunConfig) -> None:
    if config.task.reward_model is not None and REWARD_MODEL not in config.task.rewards:
        what, hint = "the reward model has no weight", f"'task.rewards={{{REWARD_MODEL}: 1.0}}'"
        found = ", ".join(config.task.rewards) or "none"
        raise ConfigError(what, where="task.rewards", found=found, allowed=f"{{{REWARD_MODEL}: WEIGHT}}", hint=hint)
    if not config.task.rewards:
        what, hint = "answers need a reward", "'task.rewards={arithmetic: 1.0}'"
        if RowFormat.prompt in config.data.formats.values():
            hint = f"data.format=prompt_completion {hint}"
        hint += "; docs/rewards.md has others, and how to write one"
        known = ", ".join((*_COMPARING_REWARDS, "overlong", REWARD_MODEL, ENVIRONMENT))
        allowed = f"{{NAME: WEIGHT}}, of {known}, or of a package of your own"
        raise ConfigError(what, where="task.rewards", found="none", allowed=allowed, hint=hint)
    compared = [name for name in config.task.rewards if name in _COMPARING_REWARDS]
    if compared and RowFormat.prompt in config.data.formats.values():
        what = "this reward compares an answer with the data's, and prompts alone have none"
        hint = "data.format=prompt_completion 'data.columns={completion: answer}', or a reward of your own"
        found = f"{compared[0]}, with format prompt"
        raise ConfigError(what, where="task.rewards, data.format", found=found, hint=hint)
    if REWARD_MODEL in config.task.rewards and config.task.reward_model is None:
        what, allowed = "it is not said which model gives this reward", "the folder of a reward model"
        hint = "task.reward_model=RUN/model, of a run that trains a reward model"
        raise conflict(config, "task.reward_model", what, allowed=allowed, hint=hint)


def _check_generators(config: RunConfig) -> None:
    if config.task.off_policy_mask_threshold is not None and not config.task.uses_generators:
        why = "answers within the step are of the policy that it trains: none is far from it; task.generators has older"
        error = misfit(config, "task.off_policy_mask_threshold", "null", why)
        error.hint = f"task.generators=1, or {error.hint}"
        raise error
    if config.task.generators_host is not None and config.task.generators_port is None:
        what, hint = "nobody is let in at this address without a port", "task.generators_port=29700"
        raise conflict(config, "task.generators_port", what, allowed="a port", hint=hint)
    if config.task.generators_port is not None and config.model.trust_remote_code:
        what = "generators of other machines do not run a model's own Python code"
        hint = "task.generators_port=null, or model.trust_remote_code=false"
        raise conflict(config, "model.trust_remote_code", what, allowed="false", hint=hint)
    if config.task.uses_generators and config.task.sync_every > config.task.max_staleness + 1:
        what = "generators would wait for a policy that they do not get, and the run for their answers"
        keys, hint = "task.sync_every task.max_staleness", f"task.max_staleness={config.task.sync_every - 1}"
        raise conflict(config, keys, what, allowed="<= task.max_staleness + 1", hint=hint)


def _check_environment(config: RunConfig) -> None:
    task, default = config.task, TaskConfig()
    if task.environment is None:
        for key in ("environment_url", "environment_seconds", "max_turns"):
            if getattr(task, key) != getattr(default, key):
                allowed = json.dumps(getattr(default, key))
                raise misfit(config, f"task.{key}", allowed, "without an environment a prompt has one answer")
        if ENVIRONMENT in task.rewards:
            what, hint = "there is no environment that gives this reward", "task.environment=guess, or another one"
            if "environment" not in task.name.traits.keys:
                hint = f"task=grpo {hint}"
            raise ConfigError(what, where="task.rewards", found=ENVIRONMENT, hint=hint)
        return
    if task.uses_generators and task.answer_seconds < task.environment_seconds:
        what = "a prompt would go to another generator while its environment may still answer"
        keys = "task.answer_seconds task.environment_seconds"
        hint = f"task.answer_seconds={min(task.max_turns * task.environment_seconds, DAY_SECONDS):g}"
        raise conflict(config, keys, what, allowed=">= task.environment_seconds", hint=hint)
    if task.environment in _COMPARING_ENVIRONMENTS and RowFormat.prompt in config.data.formats.values():
        what = "this environment needs the completion of the row, and prompts alone have none"
        found, hint = f"{task.environment}, with format prompt", "data.format=prompt_completion"
        raise ConfigError(what, where="task.environment, data.format", found=found, hint=hint)
    is_open = task.environment == "openenv"
    if is_open and re.fullmatch(r"wss?://[^/\s]+(/\S*)?", task.environment_url or "") is None:
        what, allowed = "it is not said where the server is", "ws://HOST:PORT/PATH, or wss://"
        hint = "task.environment_url=ws://127.0.0.1:8000/ws"
        raise conflict(config, "task.environment_url", what, allowed=allowed, hint=hint)
    if not is_open and task.environment_url is not None:
        raise misfit(config, "task.environment_url", "null", f"only openenv has a server, not {task.environment}")
