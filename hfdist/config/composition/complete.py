"""Values that follow from others of a config: filled in once, before all is checked."""

from __future__ import annotations

import os
from collections.abc import Collection

from hfdist.config.checks.values import check_config
from hfdist.config.data import Packing, RowFormat
from hfdist.config.model import Init
from hfdist.config.rates import default_learning_rate
from hfdist.config.run import RunConfig


def complete(values: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """Fill in what follows from other values, and check all.

    Args:
        values: a config, which is changed and given back.
        given: keys that the command line sets, which stay as they are.

    Raises:
        ConfigError: a failed check.
    """
    _expand_home(values)
    _fit_to_task(values)
    _switch_evaluation_off(values, given)
    if values.optimizer.lr is None:
        values.optimizer.lr = default_learning_rate(values)
    check_config(values)
    for source in values.data.sources.values():
        # A stream ends by the limits of its sources: nothing else reads `train.epochs`.
        source.epochs = values.train.epochs if source.epochs is None else source.epochs
    return values


def _expand_home(config: RunConfig) -> None:
    """Write `~` out once, so that no room forgets to."""
    for section, name in (
        (config.run, "dir"),
        (config.model, "name"),
        (config.checkpoint, "resume"),
        (config.adapter, "path"),
        (config.evaluate, "lm_eval_include"),
    ):
        value = getattr(section, name)
        if value is not None and value.startswith("~"):
            setattr(section, name, os.path.expanduser(value))


def _switch_evaluation_off(config: RunConfig, given: Collection[str]) -> None:
    """Evaluate nothing where nothing is held out."""
    if config.data.eval_fraction > 0 or config.data.eval_sources:
        return
    for key, section, off in (
        ("train.eval_every", config.train, None),
        ("evaluate.at_start", config.evaluate, False),
        ("checkpoint.keep_best", config.checkpoint, False),
    ):
        # What an option of the command line sets, such as checkpoint=best, is asked for as well.
        if key not in given and not (key == "checkpoint.keep_best" and "checkpoint" in given):
            setattr(section, key.rpartition(".")[2], off)


def _fit_to_task(config: RunConfig) -> None:
    """Give `auto` the values that the task needs."""
    data, task = config.data, config.task.name
    if data.format is RowFormat.auto:
        own = RowFormat.prompt_completion if task.traits.is_reinforcement else config.task.row_format
        data.format = own or RowFormat.auto
    if data.keep_columns is None:
        data.keep_columns = task.traits.is_reinforcement
    if config.evaluate.at_start is None:
        config.evaluate.at_start = config.model.init is Init.pretrained
    is_text = data.format is RowFormat.text
    # Where rows may have images, their model decides: see run/images.py.
    may_have_images = task.traits.is_of_next_tokens and not is_text and data.images.used is not False
    if data.packing is Packing.auto and not may_have_images:
        is_whole = config.task.answers_prompts or task.traits.head.gives_labels
        by_rows = Packing.none if is_whole else Packing.concat if is_text else Packing.best_fit
        data.packing = task.traits.packing or by_rows
