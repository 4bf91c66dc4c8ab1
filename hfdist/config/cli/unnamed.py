"""A folder of its own for a run without a name: the same command goes on in it, and another one gets the next."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from hfdist.config.composition.compose import COMMAND_LINE_KEYS, compose_config, to_values
from hfdist.config.composition.diff import Change, find_changes
from hfdist.config.composition.files import refuse_references
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, HfdistError, printable
from hfdist.records.run_folder import IN_RUN, RunFolder

_NAMES = ("run.name", "run.dir")
_RESULTS = (IN_RUN.checkpoints / "step-*", IN_RUN.model, IN_RUN.adapter)
_PATHS = "data.*sources.*.path"
_SHOWN_CHANGES, _SHOWN_CHARACTERS = 3, 120
_MOST_FOLDERS = 20
"""Each is composed, which takes half a second."""


def choose_run_name(config: RunConfig, given: Collection[str]) -> str | None:
    """Give the name of a run that has none, where another run has left something in its folder, and say so.

    Args:
        config: of the run that is to start.
        given: keys that the command line sets; a run whose name is among them keeps it.

    Returns:
        The new name; None: the run keeps the one that it has.

    Raises:
        ConfigError: there are too many such runs.
    """
    first, name = config.run.folder.path, config.run.name
    # Who allows changes goes on in spite of them.
    if any(key in given for key in _NAMES) or first.name != name or config.checkpoint.allow_changes:
        return None
    values = to_values(config)
    others: list[Change] = []
    free: Path | None = None
    for number in range(1, _MOST_FOLDERS + 1):
        folder = first if number == 1 else first.with_name(f"{name}-{number}")
        if not any(next(folder.glob(str(pattern)), None) for pattern in _RESULTS):
            free = free or folder
            continue
        changes = _changes(RunFolder(folder), values)
        if changes is None:
            # Its own, even where an earlier folder was removed.
            return None if number == 1 else folder.name
        others = others or changes
    if free is None:
        what, found = "there are many runs without a name", f"{_MOST_FOLDERS} folders, each with another config"
        raise ConfigError(what, where="run.name", found=found, hint=f"run.name=NAME, or remove some of {first.parent}")
    if free == first:
        return None
    shown = "; ".join(printable(str(change), _SHOWN_CHARACTERS) for change in others[:_SHOWN_CHANGES])
    sys.stderr.write(
        f"this run is {free}, as {first} holds another one ({shown or 'its config cannot be read'}); "
        "run.name=NAME names it\n"
    )
    return free.name


def _changes(folder: RunFolder, values: Mapping[str, object]) -> list[Change] | None:
    """Give what makes the run of a folder another one, [] if its config cannot be read; None: it is this one."""
    try:
        refuse_references(folder.config)
        before = to_values(compose_config(name=folder.config.stem, extra_dir=folder.path))
    except (HfdistError, OSError):
        return []
    found = [change for change in find_changes(before, values) if change.key not in COMMAND_LINE_KEYS]
    # Where a checkpoint does not compare them, data of another path are other data.
    return [change for change in found if not change.is_safe or fnmatch.fnmatch(change.key, _PATHS)] or None
