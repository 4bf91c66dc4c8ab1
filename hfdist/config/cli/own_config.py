"""`run FILE.yaml`, or the folder of a run: the recipe that the file names, and the flag that gives the file to it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hfdist.config.cli.recipe_names import NAMES, RECIPES
from hfdist.config.composition.defaults_list import refuse_config_of_others
from hfdist.config.composition.files import display, read_config, refuse_references
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.config.task import TaskName
from hfdist.errors import ConfigError, nearest
from hfdist.records import RunFolder


def as_recipe(given: str, others: Sequence[str] = ()) -> list[str]:
    """Write `run GIVEN` out.

    Args:
        given: a config file, or a folder with the `config.yaml` of a run.
        others: the arguments after it.

    Returns:
        The name of a recipe, `--config` with the file, and the others.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it does not say what it trains.
    """
    given_path = expand_user(given)
    # `os` says no to what can be no path, or may not be looked at; pathlib raises.
    is_dir = os.path.isdir(given_path)
    run = RunFolder(given_path if is_dir else given_path.parent)
    is_of_run = is_dir or (given_path == run.config and os.path.isfile(run.record))
    path = run.config if is_dir else given_path
    if not os.path.isfile(path):
        raise _no_config(given, given_path, run)
    if is_of_run:
        # A run's folder may be somebody else's: its config must not refer to files or variables of ours.
        refuse_references(path)
    recipe = _find_recipe(path, set())
    if recipe is None:
        values = read_config(path)
        if "defaults" not in values:
            refuse_config_of_others(values, display(path))
        allowed = f"one of {', '.join(RECIPES)} in its defaults list, or a task ({', '.join(_tasks())}) in task.name"
        hint = "begin it with `defaults: [finetune, _self_]`; for DPO `defaults: [tune, {override task: dpo}, _self_]`"
        raise ConfigError("the config does not say what it trains", where=display(path), allowed=allowed, hint=hint)
    return [recipe, "--config", str(path), *others]


def _no_config(given: str, path: Path, run: RunFolder) -> ConfigError:
    """Say that there is no config at `path`, with the nearest run beside it."""
    beside = path.parent.glob(f"*/{run.config.name}") if os.path.isdir(path.parent) else ()
    runs = [shlex.quote(str(other.parent)) for other in beside]
    hint = nearest(str(path), runs, "hfdist run {}") or "hfdist run FILE.yaml key=value ..."
    where, allowed = f"run ({COMMAND_LINE})", f"a .yaml file, or a run's folder, which has a {run.config.name}"
    return ConfigError("there is no such config", where=where, found=given or None, allowed=allowed, hint=hint)


def _find_recipe(path: Path, seen: set[Path]) -> str | None:
    """Give the recipe that a file begins with, itself or by a file beside it, or the one of its task."""
    seen.add(path)
    values = read_config(path)
    listed = values.get("defaults")
    items = listed if isinstance(listed, list) else []
    names = [str(item).removesuffix(".yaml") for item in items if isinstance(item, str)]
    for name in names:
        if name in RECIPES:
            return name
        beside = path.parent / f"{name}.yaml"
        if "/" not in name and beside not in seen and os.path.isfile(beside):
            found = _find_recipe(beside, seen)
            if found is not None:
                return found
    pairs = [pair for item in items if isinstance(item, Mapping) for pair in item.items()]
    chosen = {str(key).rpartition(" ")[2].lstrip("/"): option for key, option in pairs}
    task = chosen.get("task", _member(values, "task", "name"))
    if task == TaskName.causal_lm.value:
        # All recipes do the same with a whole config: this is its usual name.
        return "finetune" if _member(values, "model", "name") else "pretrain"
    return NAMES[task][0] if task in _tasks() else None


def _member(values: Mapping[str, object], section: str, name: str) -> object:
    """Give a value of a section; None: there is no such section or value."""
    own = values.get(section)
    return own.get(name) if isinstance(own, Mapping) else None


def _tasks() -> list[str]:
    return [task.value for task in TaskName]
