"""A run that has nothing left to train says so at once, from the files of its folder, before anything is loaded."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import LENGTHS, Change, changes_since
from hfdist.config.optimizer import Schedule
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError
from hfdist.records import RunRecord, State, read_run
from hfdist.units import count, duration

_IDLE_KEYS = (
    "launch.*", "strategy.*", "watch.*", "train.micro_batch_size", "train.max_hours", "train.max_cost", "train.max_kwh",
    "train.deadline", "checkpoint.allow_changes", "report.progress",
)  # fmt: skip
"""Keys that change neither the training nor what a run does at its end, such as the export."""


def describe_finished(config: RunConfig) -> str | None:
    """Say that the run has ended, where its model lies, and how to go on; None: there may be something left to do.

    It has ended where its record says so, with the same config, and the last checkpoint and the model are there.
    """
    run_dir = config.run.folder.path
    if config.checkpoint.resume != "auto":
        return None
    record = read_run(run_dir)
    if record is None or record.state is not State.finished or not isinstance(record.max_steps, int):
        return None
    if record.step != record.max_steps or not _has_results(config, record.max_steps):
        return None
    changes = changes_since(config.run.folder, to_values(config))
    if changes is None or not leaves_all_done(changes):
        _refuse_without_effect(config, changes or [], record.max_steps)
        return None
    rows = _rows(config, record, record.max_steps)
    lines = "\n".join(f"  {label:<9} {text}" for label, text in rows)
    return f"nothing left to train: {run_dir} has done all of its {count(record.max_steps, 'step')}\n{lines}\n"


def model_folder(config: RunConfig) -> Path:
    """Give the folder in which a run leaves what a user opens: its model, or its adapter where that is not merged."""
    return config.run.folder.adapter if config.adapter.is_used and not config.adapter.merge else config.run.folder.model


def _has_results(config: RunConfig, step: int) -> bool:
    checkpoint = config.run.folder.checkpoints / f"step-{step:08d}"
    return (checkpoint / "manifest.json").is_file() and any(model_folder(config).glob("*.safetensors"))


def leaves_all_done(changes: Sequence[Change]) -> bool:
    """Whether a run that has ended has nothing left to do after these changes."""
    return all(any(fnmatch.fnmatch(change.key, pattern) for pattern in _IDLE_KEYS) for change in changes)


def _refuse_without_effect(config: RunConfig, changes: Sequence[Change], steps: int) -> None:
    """Refuse what would change the training of a run that has no step left: its config would say what was not done."""
    unsafe = [change for change in changes if not change.is_safe]
    is_longer = any(change.key in LENGTHS or change.key.startswith("data.") for change in changes)
    if config.checkpoint.allow_changes and unsafe and not is_longer:
        what, hint = "the run has ended: no step is left that this could change", f"train.max_steps={2 * steps}"
        hint += " checkpoint.allow_changes=true to go on with it, or another run.name"
        raise ConfigError(what, where=config.run.dir, found=tuple(map(str, unsafe)), hint=hint)


def _rows(config: RunConfig, record: RunRecord, steps: int) -> Iterator[tuple[str, str]]:
    train, folder = config.train, model_folder(config)
    seconds = record.total("seconds")
    if seconds is not None:
        yield "used", duration(seconds)
    yield "model", str(folder)
    longer = [f"train.max_steps={2 * steps}"] if train.max_steps == steps else []
    longer += [] if train.epochs is None else [f"train.epochs={2 * train.epochs}"]
    if config.optimizer.schedule is not Schedule.constant or config.optimizer.warmup_fraction:
        # The rate of every step depends on the length.
        longer.append("checkpoint.allow_changes=true")
    yield "go on", f"the same command with {' '.join(longer)}"
    yield "or", "the same command with another run.name, which trains anew"
    yield "look", f"hfdist report {shlex.quote(config.run.dir)}"
