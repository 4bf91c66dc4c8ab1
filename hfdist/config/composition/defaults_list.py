"""Checks the defaults list of a user's own primary config, where Hydra's own words do not say what to write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from hfdist.config.composition.aliases import override_for, override_for_option
from hfdist.config.composition.files import display, read_config
from hfdist.config.composition.options import unknown_option
from hfdist.config.composition.path_overrides import in_yaml
from hfdist.config.composition.request import Request
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.override_text import in_shell
from hfdist.config.schema import ANY_NAME, all_keys, members
from hfdist.errors import ConfigError, nearest

_SELF = "_self_"
_SHOWN = 8
_PAGE = "keys of hfdist: docs/coming-from.md has what others call them"


def check_defaults_list(request: Request) -> None:
    """Raise a ConfigError on the first mistake in the list; hfdist's own files have none."""
    path = request.file(request.config_name)
    if path is None or path.parent == shipped_folder():
        return
    values = read_config(path)
    listed, place, recipes = values.get("defaults"), display(path), list_options(shipped_folder(), ".")
    where = f"defaults ({place})"
    if listed is None:
        refuse_config_of_others(values, place)
        return
    if not isinstance(listed, list):
        hint = f"`defaults: [{listed if listed in recipes else recipes[0]}, {_SELF}]`"
        raise ConfigError("the defaults list is no list", where=where, found=listed, allowed="a list", hint=hint)
    names = [item for item in listed if isinstance(item, str)]
    groups = request.groups()
    for name in names:
        _check_name(name, groups, request, where)
    recipe = next((name for name in names if name in recipes), None)
    if recipe is not None and _SELF in names[: names.index(recipe)] and values.keys() - {"defaults"}:
        what, hint = f"the values of {recipe} come after those of the file, and win", f"`[{recipe}, {_SELF}]`"
        raise ConfigError(what, where=where, found=f"{_SELF} before {recipe}", hint=hint)
    for keyword, group, option in _chosen(listed):
        if not group.startswith("hydra") and keyword != "optional" and (group in groups or "/" not in group):
            _check_option(keyword, group, option, recipe, groups, request, where)


def _chosen(listed: Sequence[object]) -> Iterator[tuple[str, str, str]]:
    """Give what stands before a group, its name, and the option, of each item that chooses one."""
    for item in listed:
        for key, option in item.items() if isinstance(item, Mapping) else ():
            keyword, _, group = str(key).rpartition(" ")
            if isinstance(option, str) and "${" not in option:
                yield keyword, group.lstrip("/").partition("@")[0], option.removesuffix(".yaml")


def refuse_config_of_others(values: Mapping[str, object], place: str) -> None:
    """Raise a ConfigError on the config of accelerate or of another trainer, with the command that does the same."""
    if {"compute_environment", "distributed_type"} & values.keys():
        start = f"accelerate launch --config_file {shlex.quote(place)} recipes/NAME.py ..."
        hint = f"{start}, where NAME is pretrain, finetune or tune"
        raise ConfigError("this is a config of accelerate", where=place, found=next(iter(values)), hint=hint)
    if "zero_optimization" in values:
        section = values["zero_optimization"]
        stage = section.get("stage") if isinstance(section, dict) else None
        what, file = "this is a config of DeepSpeed", shlex.quote(f"strategy.deepspeed={place}")
        hint = f"strategy=zero{stage if stage in (1, 2, 3) else 2} {file}, without --config"
        hint += "" if place.endswith(".json") else "; as a file of JSON, whose name ends in .json"
        raise ConfigError(what, where=place, found=next(iter(values)), hint=hint)
    by_leaf = {key.rpartition(".")[2]: key for key in reversed([*all_keys()]) if ANY_NAME not in key}
    others = {
        name: override_for(name, value) or (_override(by_leaf[name], value) if name in by_leaf else None)
        for name, value in values.items()
        if name not in members("")
    }
    sets = values.get("datasets")
    if isinstance(sets, list) and len(sets) == 1 and isinstance(sets[0], dict):
        # Axolotl lists its data under this name.
        others["datasets"] = override_for("dataset", sets[0].get("path"))
    written = [
        override
        for override in others.values()
        if override is not None and "..." not in override and "=" in override.split()[0]
    ]
    if len(written) > 1:
        what, left = "this is a config of another trainer", [name for name, one in others.items() if one not in written]
        more = (
            f"; what {', '.join(left[:_SHOWN])} {'mean' if len(left) > 1 else 'means'} is to be added" if left else ""
        )
        recipe = "finetune" if any(one.startswith(("model=", "model.name=")) for one in written) else "pretrain"
        hint = f"hfdist {recipe} {' '.join(written)}{more}"
        raise ConfigError(what, where=place, found=", ".join(map(str, others)), allowed=_PAGE, hint=hint)


def _override(key: str, value: object) -> str | None:
    """Write a value for the command line; None: it is no plain one."""
    if isinstance(value, dict | list):
        return None
    return in_shell(key, value)


def _check_name(name: str, all_groups: Mapping[str, list[str]], request: Request, where: str) -> None:
    recipes = list_options(shipped_folder(), ".")
    if name in (_SELF, "run_schema") or "/" in name or request.file(name.partition("@")[0]) is not None:
        return
    groups = [group for group, options in all_groups.items() if name in options]
    hint = f"`override /{groups[0]}: {name}`" if groups else nearest(name, recipes, "`{}`", cutoff=0.6)
    allowed = f"{', '.join(recipes)}, {_SELF}, or `override /GROUP: OPTION`"
    raise ConfigError("there is no such config", where=where, found=name, allowed=allowed, hint=hint)


def _check_option(
    keyword: str,
    group: str,
    option: str,
    recipe: str | None,
    groups: Mapping[str, list[str]],
    request: Request,
    where: str,
) -> None:
    if group not in groups:
        allowed, hint = ", ".join(groups), nearest(group, groups, f"`override /{{}}: {option}`")
        raise ConfigError(f"there is no group `{group}`", where=where, found=group, allowed=allowed, hint=hint)
    if request.file(f"{group}/{option}") is None:
        called, _, other = (override_for_option(group, option) or "").partition("=")
        hint = f"`override /{called}: {other}`" if called in groups else None
        if "." in called:
            hint = f"`{in_yaml(called, other)}`, in place of this line"
        hint = hint or nearest(option, groups[group], f"`override /{group}: {{}}`")
        raise unknown_option(group, option, groups[group], where, hint)
    if recipe is not None and not keyword and group != "experiment":
        what, hint = f"{recipe} has chosen an option of this group already", f"`override /{group}: {option}`"
        raise ConfigError(what, where=where, found=f"{group}: {option}", hint=f"{hint} at the end of the list")
