"""Checks `optimizer.*`: rates, schedules, and changes of them."""

from __future__ import annotations

import math

from hfdist.config.batch import num_warmup_steps
from hfdist.config.checks.conflict import conflict
from hfdist.config.islands import IslandMethod
from hfdist.config.optimizer import Schedule
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError


def check_optimizer(config: RunConfig) -> None:
    """Check warm-up, schedule, changes and base width; ConfigError: they do not go together."""
    _check_warmup(config)
    if config.train.max_steps is not None and config.train.epochs is None:
        check_schedule(config, config.train.max_steps)
    _check_end_of_schedule(config)
    _check_changes(config)
    _check_base_width(config)


def _check_warmup(config: RunConfig) -> None:
    names = ("warmup_steps", "warmup_tokens", "warmup_fraction")
    given = {f"optimizer.{name}": value for name in names if (value := getattr(config.optimizer, name))}
    if len(given) > 1:
        found, hint = ", ".join(map(str, given.values())), " ".join(f"{key}=null" for key in [*given][1:])
        raise ConfigError("the warm-up is given more than once", where=", ".join(given), found=found, hint=hint)


def _check_end_of_schedule(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.name.is_schedule_free and optimizer.schedule is not Schedule.constant:
        what = "a schedule-free optimizer averages weights instead of lowering the rate"
        keys = "optimizer.schedule optimizer.name"
        raise conflict(config, keys, what, allowed="constant", hint="optimizer.schedule=constant")
    if optimizer.min_lr_ratio is not None and optimizer.schedule in (Schedule.linear, Schedule.constant):
        end = "0" if optimizer.schedule is Schedule.linear else "its peak"
        what = f"the {optimizer.schedule.value} schedule ends at {end}, so a smallest rate has no meaning"
        hint = "optimizer.min_lr_ratio=null, or optimizer.schedule=cosine"
        raise conflict(config, "optimizer.min_lr_ratio", what, allowed="null", hint=hint)


def _check_base_width(config: RunConfig) -> None:
    if config.optimizer.base_width is None:
        return
    hint = "optimizer.base_width=null"
    if config.adapter.is_used:
        what = "the matrices of an adapter have a width of their own, its rank"
        keys = f"optimizer.base_width adapter.{'type' if config.adapter.path is None else 'path'}"
        raise conflict(config, keys, what, allowed="null", hint=hint)
    if config.islands.method is IslandMethod.parameter_server:
        what, keys = "the server steps all parameters at one rate", "optimizer.base_width islands.method"
        raise conflict(config, keys, what, allowed="null", hint=hint)


def _check_changes(config: RunConfig) -> None:
    optimizer = config.optimizer
    steps = [change.step for change in optimizer.changes]
    if steps != sorted(set(steps)):
        what, found = "the changes must stand in the order of their steps", ", ".join(map(str, steps))
        raise ConfigError(what, where="optimizer.changes", found=found, allowed="rising steps")
    if not optimizer.weight_decay and any(change.weight_decay is not None for change in optimizer.changes):
        what = "weight decay cannot begin at a change: which parameters decay is decided at the start"
        hint = "optimizer.weight_decay=1e-9"
        raise conflict(config, "optimizer.weight_decay", what, allowed="above 0, if it changes", hint=hint)
    if optimizer.changes and config.islands.method is IslandMethod.parameter_server:
        what, hint = "the server has the optimizer, whose values stay", "optimizer.changes=[]"
        raise conflict(config, "optimizer.changes islands.method", what, allowed="none", hint=hint)


def check_schedule(config: RunConfig, max_steps: int) -> None:
    """Check warm-up and decay against the number of steps; ConfigError: they are longer than the run."""
    optimizer = config.optimizer
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    warmup_steps = num_warmup_steps(optimizer, tokens_per_step=tokens_per_step, max_steps=max_steps)
    if warmup_steps >= max_steps:
        leaf = "warmup_tokens" if optimizer.warmup_tokens else "warmup_steps"
        what = "the warm-up is as long as the whole run, so the learning rate never reaches its peak"
        found, allowed = f"{warmup_steps} steps of {max_steps}", f"fewer than {max_steps} steps"
        hint = f"optimizer.{leaf}={getattr(optimizer, leaf) * (max_steps // 10) // warmup_steps}"
        raise ConfigError(what, where=f"optimizer.{leaf}", found=found, allowed=allowed, hint=hint)
    decay_steps = round(max_steps * optimizer.decay_fraction)
    if optimizer.schedule is Schedule.wsd and warmup_steps + decay_steps > max_steps:
        what = "warm-up and decay are longer than the run"
        found = f"{warmup_steps} + {decay_steps} steps of {max_steps}"
        allowed = f"<= {(max_steps - warmup_steps) / max_steps:g}"
        hint = f"optimizer.decay_fraction={math.floor((max_steps - warmup_steps) / max_steps * 1000) / 1000:g}"
        raise ConfigError(what, where="optimizer.decay_fraction", found=found, allowed=allowed, hint=hint)
