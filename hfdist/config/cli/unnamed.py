"""A folder of its own for a run without a name: the same command goes on in it, and another one gets the next."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from hfdist.config.composition.compose import compose_config, to_values
from hfdist.config.composition.diff import Change, find_changes
from hfdist.config.composition.files import refuse_references
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, HfdistError

_NAMES = ("run.name", "run.dir")
_RESULTS = ("checkpoints/step-*", "model", "adapter")
_SHOWN_CHANGES = 3
_MOST_FOLDERS = 20
"""Each is composed, which takes half a second."""


def give_folder(config: RunConfig, given: Collection[str]) -> None:
    """Change `run.name` and `run.dir` where another run has left something in that folder, and say so.

    Args:
        config: of the run that is to start; it is changed.
        given: keys that the command line sets; a run whose name is among them keeps it.
    """
    folder, name = Path(config.run.dir), config.run.name
    if any(key in given for key in _NAMES) or folder.name != name:
        return
    others: list[Change] = []
    for number in range(1, _MOST_FOLDERS + 1):
        folder = folder.with_name(name if number == 1 else f"{name}-{number}")
        if (changes := _changes(folder, config)) is None:
            break
        others = others or changes
    else:
        what, found = "there are many runs without a name", f"{name} to {folder.name}, all with other configs"
        raise ConfigError(what, where="run.name", found=found, hint=f"run.name=NAME, or remove some of {folder.parent}")
    if number == 1:
        return
    config.run.name, config.run.dir = folder.name, str(folder)
    shown = "; ".join(map(str, others[:_SHOWN_CHANGES])) or "its config cannot be read"
    sys.stderr.write(
        f"this run is {folder}, as {folder.with_name(name)} holds another one ({shown}); run.name=NAME names it\n"
    )


def _changes(folder: Path, config: RunConfig) -> list[Change] | None:
    """Give what makes the run of a folder another one; None: it is this one, or has left nothing."""
    if not any(next(folder.glob(pattern), None) for pattern in _RESULTS):
        return None
    try:
        refuse_references(folder / "config.yaml")
        before = to_values(compose_config(name="config", extra_dir=folder))
    except (HfdistError, OSError):
        return []
    return [change for change in find_changes(before, to_values(config)) if not change.is_safe] or None
