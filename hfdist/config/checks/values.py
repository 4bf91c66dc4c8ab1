"""Checks a composed config, before anything is built: single values, then what must fit together, group by group."""

from __future__ import annotations

import re

from hfdist.config.checks.adapter import check_adapter
from hfdist.config.checks.budgets import check_limits
from hfdist.config.checks.checkpoint import check_checkpoints
from hfdist.config.checks.conflict import conflict
from hfdist.config.checks.data import check_data
from hfdist.config.checks.deepspeed import check_optimizer_sections
from hfdist.config.checks.evaluate import check_evaluate
from hfdist.config.checks.islands import check_islands
from hfdist.config.checks.model import check_model, check_tokens
from hfdist.config.checks.optimizer import check_optimizer
from hfdist.config.checks.report import check_report
from hfdist.config.checks.strategy import check_layout
from hfdist.config.checks.task import check_task
from hfdist.config.checks.train import check_train
from hfdist.config.plain_values import check_items
from hfdist.config.run import RunConfig
from hfdist.config.schema import values_by_key
from hfdist.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Check ranges, then contradictions; ConfigError: the first that is found."""
    _check_ranges(config)
    _check_run(config)
    check_model(config)
    check_adapter(config)
    check_data(config.data)
    check_task(config)
    check_layout(config.strategy, config.train)
    check_optimizer_sections(config.strategy.deepspeed, config)
    check_optimizer(config)
    check_tokens(config)
    check_train(config)
    check_evaluate(config)
    check_report(config)
    check_checkpoints(config)
    check_limits(config)
    check_islands(config)


def _check_ranges(config: RunConfig) -> None:
    for key, value in values_by_key(config, ""):
        if key.limit is not None and value is not None and not key.limit.accepts(value):
            what = "the number is out of range" if "number" in key.allowed else "the value is of another kind"
            raise ConfigError(what, where=key.name, found=value, allowed=key.allowed)
        check_items(key, value)


def _check_run(config: RunConfig) -> None:
    if not re.fullmatch(r"\w[\w.=,+-]{0,127}", config.run.name):
        allowed = "up to 128 letters, digits and _ . = , + -; the first a letter, digit or _"
        # Who writes a path, such as runs/first, means its last part.
        last = config.run.name.rstrip("/").rpartition("/")[2]
        plain_name = re.sub(r"[^\w.=,+-]+", "-", last).strip(".=,+-")[:128] or "first"
        what = "the run's name must be a plain folder name"
        hint = f"run.name={plain_name}; the folder, which may be anywhere, is run.dir"
        raise conflict(config, "run.name", what, allowed=allowed, hint=hint)
    if not config.run.dir.strip():
        raise conflict(config, "run.dir", "not a folder", allowed="a path", hint="run.dir=runs/first")
    push_to = config.export.push_to
    if push_to is not None and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", push_to):
        allowed = "OWNER/NAME: letters, digits, - _ ."
        raise conflict(config, "export.push_to", "this is no repository of the Hub", allowed=allowed)
