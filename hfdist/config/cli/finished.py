"""A run that has nothing left to train says so at once, from the files of its folder, before anything is loaded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hfdist.config.composition.compose import COMMAND_LINE_KEYS, compose_config, to_values
from hfdist.config.composition.diff import find_changes
from hfdist.config.composition.files import refuse_references
from hfdist.config.optimizer import Schedule
from hfdist.config.run import RunConfig
from hfdist.errors import HfdistError
from hfdist.records import RunRecord, State, read_run
from hfdist.units import count, duration

# Keys that change neither the training nor what a run does at its end, such as the export.
_IDLE = (
    *("launch.*", "strategy.*", "watch.*", "train.micro_batch_size", "train.max_hours", "train.max_cost"),
    *("train.max_kwh", "train.deadline", "checkpoint.allow_changes", "report.progress"),
)


def describe_finished(config: RunConfig) -> str | None:
    """Say that the run has ended, where its model lies, and how to go on; None: there may be something left to do.

    It has ended where its record says so, with the same config, and the last checkpoint and the model are there.
    """
    run_dir = Path(config.run.dir)
    if config.checkpoint.resume != "auto":
        return None
    record = read_run(run_dir)
    if record is None or record.state is not State.finished or not isinstance(record.max_steps, int):
        return None
    if record.step != record.max_steps or not _has_results(config, record.max_steps) or not _has_same_config(config):
        return None
    rows = _rows(config, record, record.max_steps)
    lines = "\n".join(f"  {label:<9} {text}" for label, text in rows)
    return f"nothing left to train: {run_dir} has done all of its {count(record.max_steps, 'step')}\n{lines}\n"


def model_folder(config: RunConfig) -> Path:
    """Give the folder in which a run leaves what a user opens: its model, or its adapter where that is not merged."""
    return Path(config.run.dir) / ("adapter" if config.adapter.is_used and not config.adapter.merge else "model")


def _has_results(config: RunConfig, step: int) -> bool:
    checkpoint = Path(config.run.dir) / "checkpoints" / f"step-{step:08d}"
    return (checkpoint / "manifest.json").is_file() and any(model_folder(config).glob("*.safetensors"))


def _has_same_config(config: RunConfig) -> bool:
    folder = Path(config.run.dir)
    try:
        refuse_references(folder / "config.yaml")
        before = to_values(compose_config(name="config", extra_dir=folder))
    except (HfdistError, OSError):
        return False
    return leaves_all_done(before, to_values(config))


def leaves_all_done(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a run that has ended with the config `before` has nothing left to do with `after`."""
    keys = [change.key for change in find_changes(before, after) if change.key not in COMMAND_LINE_KEYS]
    return all(any(fnmatch.fnmatch(key, pattern) for pattern in _IDLE) for key in keys)


def _rows(config: RunConfig, record: RunRecord, steps: int) -> Iterator[tuple[str, str]]:
    train, folder = config.train, model_folder(config)
    seconds = record.total("seconds")
    took = "" if seconds is None else f" in {duration(seconds)}"
    yield "trained", f"{record.tokens:,} tokens{took}" if isinstance(record.tokens, int) else f"{steps:,} steps{took}"
    yield "model", str(folder)
    longer = [f"train.max_steps={2 * steps}"] if train.max_steps == steps else []
    longer += [] if train.epochs is None else [f"train.epochs={2 * train.epochs}"]
    if config.optimizer.schedule is not Schedule.constant:
        # The rate of every step depends on the length.
        longer.append("checkpoint.allow_changes=true")
    yield "go on", f"the same command with {' '.join(longer)}"
    yield "or", "the same command with another run.name, which trains anew"
    yield "look", f"hfdist report {config.run.dir}"
