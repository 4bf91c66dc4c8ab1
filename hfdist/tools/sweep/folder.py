"""Two files in a sweep's folder: its settings with its notes, and the config of the best trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hfdist.atomic_write import write_atomically
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.override_text import as_override, as_overrides
from hfdist.config.plain_values import plain
from hfdist.config.sweep import GROUP, Sampler, SweepConfig
from hfdist.errors import ConfigError
from hfdist.records.lines import parse_line
from hfdist.records.trials import NOTES, SETTINGS, Trial
from hfdist.tools.sweep.sweep import Sweep

BEST = "best"
"""Name of the run that trains as the best trial did, and of the file with its config, before `.yaml`."""


def write_best(sweep: Sweep, history: Sequence[Trial]) -> Path:
    """Write `best.yaml`: the config of one run that trains as the best trial did.

    Args:
        sweep: the sweep.
        history: the trials whose values the steps of the best trial had: its parents, the earliest first, and itself.

    Returns:
        The path of the file.
    """
    first, best, folder = history[0], history[-1], sweep.folder / BEST
    overrides = [*as_overrides(first.values), as_override("run.dir", str(folder)), f"run.name={BEST}"]
    changes = _changes_of_values(history)
    if changes:
        overrides.append(f"optimizer.changes=[{', '.join(changes)}]")
    if sweep.has_lengths:
        overrides += sweep.length_of(best, len(best.results) - 1)
    path = sweep.folder / f"{BEST}.yaml"
    # The file names the folder by the run's name, so that a run by another name gets another folder.
    named_folder = f"{sweep.folder}/${{run.name}}"
    text = to_yaml(sweep.compose(overrides)).replace(f"  dir: {folder}\n", f"  dir: {named_folder}\n", 1)
    write_atomically(path, text.encode())
    return path


def _changes_of_values(history: Sequence[Trial]) -> list[str]:
    """Give the items of `optimizer.changes`: the values of a trial that its parent did not have, from its first step.

    An item is written as `{step: 100, lr: 0.001}`.
    """
    changes = []
    for parent, trial in pairwise(history):
        fields = [
            f"{key.removeprefix('optimizer.')}: {value}"
            for key, value in trial.values.items()
            if value != parent.values[key]
        ]
        if fields:
            changes.append("{" + ", ".join([f"step: {parent.results[-1].step}", *fields]) + "}")
    return changes


def keep_settings(sweep: Sweep) -> None:
    """Write the settings of a sweep, or compare them with the settings that its folder has.

    Raises:
        ConfigError: the folder has the settings of another sweep.
    """
    config = sweep.config
    path = sweep.folder / SETTINGS
    # What may differ when a sweep goes on: slots and devices, and the number of trials, but not that of a population's
    # members. The space is compared as it was read, whether sweep.space or the command line had it.
    left_out = {"slots", "devices", "space"}
    if config.sampler is not Sampler.pbt:
        left_out.add("trials")
    settings = {key: value for key, value in plain(config).items() if key not in left_out}
    settings |= {"space": [repr(dimension) for dimension in sweep.space.dimensions], "command": list(sweep.base)}
    if not path.is_file():
        write_atomically(path, json.dumps(settings, indent=1).encode())
        return
    # A key that hfdist did not have when the sweep began has its default.
    before = plain(SweepConfig()) | (parse_line(path.read_bytes()) or {})
    changed = sorted(key for key in settings if settings[key] != before.get(key))
    if changed:
        raise ConfigError(
            "the sweep in this folder has begun otherwise",
            where=", ".join("the runs' config" if key == "command" else f"{GROUP}.{key}" for key in changed),
            found=str(sweep.folder),
            hint="the command that it began with, or another run.name",
        )


def keep_notes(sweep: Sweep, notes: Sequence[str]) -> None:
    """Add notes to the settings in the sweep's folder, where its page finds them."""
    path = sweep.folder / SETTINGS
    settings = parse_line(path.read_bytes()) or {}
    write_atomically(path, json.dumps(settings | {NOTES: list(notes)}, indent=1).encode())
