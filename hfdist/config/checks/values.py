"""Checks of a composed config, before anything is built: each value by itself, then values that must fit together.

Ranges come first, since the other checks compute with the values. A check gives only the first mistake.
"""

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
    """Check the values of a whole config; ConfigError: the first mistake that is found."""
    _check_ranges(config)
    _check_run_name(config)
    _check_run_folder(config)
    _check_hub_repository(config)
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
    """Check each value by itself against the limit of its key, and that no list stands where a text belongs."""
    for key, value in values_by_key(config, ""):
        if key.limit is not None and value is not None and not key.limit.accepts(value):
            # A limit is a range of a number, or a pattern of a text: its own words say which.
            is_range = "number" in key.allowed
            what = "the number is out of range" if is_range else "the value is of another kind"
            raise ConfigError(what, where=key.name, found=value, allowed=key.allowed)
        check_items(key, value)


def _check_run_name(config: RunConfig) -> None:
    """Refuse a name that is no plain name of a folder; the hint is the plain name that is most like it."""
    name = config.run.name
    if re.fullmatch(r"\w[\w.=,+-]{0,127}", name):
        return
    # Who writes a path, such as runs/first, means its last part.
    last_part = name.rstrip("/").rpartition("/")[2]
    plain_name = re.sub(r"[^\w.=,+-]+", "-", last_part)
    plain_name = plain_name.strip(".=,+-")[:128] or "first"
    what = "the run's name must be a plain folder name"
    allowed = "up to 128 letters, digits and _ . = , + -; the first a letter, digit or _"
    hint = f"run.name={plain_name}; the folder, which may be anywhere, is run.dir"
    raise conflict(config, "run.name", what, allowed=allowed, hint=hint)


def _check_run_folder(config: RunConfig) -> None:
    """Refuse an empty path: it would be the folder in which the command runs."""
    if not config.run.dir.strip():
        raise conflict(config, "run.dir", "not a folder", allowed="a path", hint="run.dir=runs/first")


def _check_hub_repository(config: RunConfig) -> None:
    """Refuse a repository that the Hub would refuse only at the end of the run."""
    push_to = config.export.push_to
    if push_to is not None and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", push_to):
        allowed = "OWNER/NAME: letters, digits, - _ ."
        raise conflict(config, "export.push_to", "this is no repository of the Hub", allowed=allowed)
