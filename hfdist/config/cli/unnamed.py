"""Names of runs that were given none: the same command goes on in its folder, another one gets the next free one."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import Change, changes_since
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, printable
from hfdist.records.run_folder import IN_RUN, RunFolder

_NAMES = ("run.name", "run.dir")
"""Keys that name a run; one that sets them gets no other name."""
_RESULTS = (IN_RUN.checkpoints / "step-*", IN_RUN.model, IN_RUN.adapter)
"""What makes a folder that of a run, by pattern."""
_PATHS = "data.*sources.*.path"
"""Keys of data paths: only a checkpoint knows whether other files hold the same."""
_MOST_CHANGES = 3
"""Changes that the message shows."""
_MOST_CHARACTERS = 120
"""Characters of each of them."""
_MOST_FOLDERS = 20
"""Folders that are looked at: the config of each is composed, which takes half a second."""


def choose_run_name(config: RunConfig, given: Collection[str]) -> str | None:
    """Choose the folder of a run without a name: that in which it began, else the first free one, which is said.

    Args:
        config: the config of the run that is to start.
        given: keys that the command line sets; a run whose name is among them keeps it.

    Returns:
        The new name; None: the run keeps the one that it has.

    Raises:
        ConfigError: there are too many such runs.
    """
    first, name = config.run.folder.path, config.run.name
    # With checkpoint.allow_changes it goes on in the folder of its name, whatever has changed.
    if any(key in given for key in _NAMES) or first.name != name or config.checkpoint.allow_changes:
        return None
    values = to_values(config)
    folders = [first, *(first.with_name(f"{name}-{number}") for number in range(2, _MOST_FOLDERS + 1))]
    free: list[Path] = []
    changes_of_first: Sequence[Change] | None = None
    for folder in folders:
        if not any(next(folder.glob(str(pattern)), None) for pattern in _RESULTS):
            free.append(folder)
            continue
        changes = changes_since(RunFolder(folder), values)
        if changes is not None and not any(map(_makes_another_run, changes)):
            # It goes on here, even where an earlier folder is free by now.
            return None if folder == first else folder.name
        if folder == first:
            changes_of_first = changes
    if not free:
        what, found = "there are many runs without a name", f"{_MOST_FOLDERS} folders, each with another config"
        raise ConfigError(what, where="run.name", found=found, hint=f"run.name=NAME, or remove some of {first.parent}")
    if free[0] == first:
        return None
    why = _describe(changes_of_first)
    sys.stderr.write(f"this run is {free[0]}, as {first} holds another one ({why}); run.name=NAME names it\n")
    return free[0].name


def check_named(config: RunConfig, given: Collection[str]) -> None:
    """Raise a ConfigError on a mirror of a run without a name: runs of several machines would share a folder there."""
    if config.checkpoint.mirror is not None and "run.name" not in given:
        what, hint = "a run with a mirror needs a name of its own", "run.name=NAME, the same one for each start of it"
        raise ConfigError(what, where="run.name", found=f"{config.run.name}, as none was given", hint=hint)


def _makes_another_run(change: Change) -> bool:
    return not change.is_safe or fnmatch.fnmatch(change.key, _PATHS)


def _describe(changes: Sequence[Change] | None) -> str:
    if changes is None:
        return "its config cannot be read"
    texts = [str(change) for change in changes if _makes_another_run(change)]
    return "; ".join(printable(text, _MOST_CHARACTERS) for text in texts[:_MOST_CHANGES])
