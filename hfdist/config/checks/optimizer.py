"""Checks of the keys `optimizer.*`: warm-up, schedule, changes of rates at a step, and the base width."""

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
    # How many steps the epochs have is known only with the data: `check_schedule` is called then.
    if config.train.max_steps is not None and config.train.epochs is None:
        check_schedule(config, config.train.max_steps)
    _check_end_of_schedule(config)
    _check_changes(config)
    _check_base_width(config)


def _check_warmup(config: RunConfig) -> None:
    """Refuse a length of the warm-up in more than one unit."""
    lengths = {
        "optimizer.warmup_steps": config.optimizer.warmup_steps,
        "optimizer.warmup_tokens": config.optimizer.warmup_tokens,
        "optimizer.warmup_fraction": config.optimizer.warmup_fraction,
    }
    given = {key: length for key, length in lengths.items() if length}
    if len(given) > 1:
        _, *others = given
        raise ConfigError(
            "the warm-up is given more than once",
            where=", ".join(given),
            found=", ".join(str(length) for length in given.values()),
            hint=" ".join(f"{key}=null" for key in others),
        )


def _check_end_of_schedule(config: RunConfig) -> None:
    """Refuse a schedule, or a smallest rate, that has no meaning for what comes at the end of the run."""
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
    """Refuse rates by the width of each matrix, where one rate is for all or the width is another one."""
    if config.optimizer.base_width is None:
        return
    hint = "optimizer.base_width=null"
    if config.adapter.is_used:
        what = "the matrices of an adapter have a width of their own, its rank"
        adapter_key = "adapter.type" if config.adapter.path is None else "adapter.path"
        raise conflict(config, f"optimizer.base_width {adapter_key}", what, allowed="null", hint=hint)
    if config.islands.method is IslandMethod.parameter_server:
        what, keys = "the server steps all parameters at one rate", "optimizer.base_width islands.method"
        raise conflict(config, keys, what, allowed="null", hint=hint)


def _check_changes(config: RunConfig) -> None:
    """Refuse changes out of order, and those that the optimizer of the run cannot make."""
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
    """Check warm-up and decay against a run of `max_steps` steps; ConfigError: they are longer than the run."""
    optimizer = config.optimizer
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    warmup_steps = num_warmup_steps(optimizer, tokens_per_step=tokens_per_step, max_steps=max_steps)
    # A warm-up that is a share of the steps is cut to fewer than all, so this one is given in tokens or in steps.
    if warmup_steps >= max_steps:
        if optimizer.warmup_tokens:
            key, length = "optimizer.warmup_tokens", optimizer.warmup_tokens
        else:
            key, length = "optimizer.warmup_steps", optimizer.warmup_steps
        # A warm-up of a tenth of the run is common; its length is in the unit of the key.
        tenth = length * (max_steps // 10) // warmup_steps
        what = "the warm-up is as long as the whole run, so the learning rate never reaches its peak"
        found, allowed = f"{warmup_steps} steps of {max_steps}", f"fewer than {max_steps} steps"
        raise ConfigError(what, where=key, found=found, allowed=allowed, hint=f"{key}={tenth}")
    decay_steps = round(max_steps * optimizer.decay_fraction)
    if optimizer.schedule is Schedule.wsd and warmup_steps + decay_steps > max_steps:
        largest = (max_steps - warmup_steps) / max_steps
        # It is rounded down: a fraction rounded up would be refused again.
        rounded = math.floor(largest * 1000) / 1000
        raise ConfigError(
            "warm-up and decay are longer than the run",
            where="optimizer.decay_fraction",
            found=f"{warmup_steps} + {decay_steps} steps of {max_steps}",
            allowed=f"<= {largest:g}",
            hint=f"optimizer.decay_fraction={rounded:g}",
        )
