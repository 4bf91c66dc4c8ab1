"""Files of a sweep's folder besides those of trials: settings with notes, and the config of the best trial."""

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
"""Name of the run that trains as the best trial did, and of its config."""


def write_best(sweep: Sweep, history: Sequence[Trial]) -> Path:
    """Write `best.yaml`: the config of one run that trains as the best trial did.

    Args:
        sweep: the sweep.
        history: the best trial, after its parents, the earliest first.

    Returns:
        The path of the file.
    """
    changes = []
    for before, after in pairwise(history):
        values = {key: value for key, value in after.values.items() if value != before.values[key]}
        words = [f"step: {before.results[-1].step}", *(f"{key[len('optimizer.') :]}: {values[key]}" for key in values)]
        changes += [f"{{{', '.join(words)}}}"] if values else []
    own = [*as_overrides(history[0].values), as_override("run.dir", str(sweep.folder / BEST)), f"run.name={BEST}"]
    own += [f"optimizer.changes=[{', '.join(changes)}]"] if changes else []
    own += sweep.length_of(history[-1], len(history[-1].results) - 1) if sweep.has_lengths else []
    path = sweep.folder / f"{BEST}.yaml"
    text = to_yaml(sweep.compose(own))
    # So that another name is another folder.
    text = text.replace(f"  dir: {sweep.folder / BEST}\n", f"  dir: {sweep.folder}/${{run.name}}\n", 1)
    write_atomically(path, text.encode())
    return path


def keep_settings(sweep: Sweep) -> None:
    """Write the settings of a sweep; ConfigError: its folder has those of another one."""
    config = sweep.config
    path = sweep.folder / SETTINGS
    # Machines and slots may change, and the number of trials, too, unless these are the members of a population.
    free = ["slots", "devices", "space", *([] if config.sampler is Sampler.pbt else ["trials"])]
    asked = {key: value for key, value in plain(config).items() if key not in free}
    asked |= {"space": [repr(one) for one in sweep.space.dimensions], "command": list(sweep.base)}
    if path.is_file():
        # A key that hfdist did not have when the sweep began has its default.
        before = plain(SweepConfig()) | (parse_line(path.read_bytes()) or {})
        changed = sorted(key for key in asked if asked[key] != before.get(key))
        if changed:
            raise ConfigError(
                "the sweep in this folder has begun otherwise",
                where=", ".join(f"{GROUP}.{key}" if key != "command" else "the runs' config" for key in changed),
                found=str(sweep.folder),
                hint="the command that it began with, or another run.name",
            )
        return
    write_atomically(path, json.dumps(asked, indent=1).encode())


def keep_notes(sweep: Sweep, notes: Sequence[str]) -> None:
    """Add notes to the settings, for the page of the sweep."""
    path = sweep.folder / SETTINGS
    settings = parse_line(path.read_bytes()) or {}
    write_atomically(path, json.dumps(settings | {NOTES: list(notes)}, indent=1).encode())
