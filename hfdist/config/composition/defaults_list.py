"""Checks of the defaults list in a user's own primary config: their errors say what to write, where Hydra's do not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
"""The line of a defaults list that stands for the values of the file itself."""
_MOST_SHOWN = 8
"""Number of names without a key that a hint lists at the most."""
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
    for choice in _find_choices(listed):
        is_of_hydra = choice.group.startswith("hydra")
        # A group with a slash in its name may be a folder of the user's own.
        may_be_wrong = choice.group in groups or "/" not in choice.group
        if may_be_wrong and not is_of_hydra and choice.keyword != "optional":
            _check_choice(choice, recipe, groups, request, where)


class _Choice(NamedTuple):
    """An item of a defaults list that chooses an option, such as `override /strategy: zero2`."""

    keyword: str
    """The word before the group: override, optional, or none."""
    group: str
    option: str


def _find_choices(listed: Sequence[object]) -> Iterator[_Choice]:
    """Give the items that choose an option by its name; one that a reference names is Hydra's to find."""
    for item in listed:
        if not isinstance(item, Mapping):
            continue
        for key, option in item.items():
            keyword, _, group = str(key).rpartition(" ")
            if isinstance(option, str) and "${" not in option:
                yield _Choice(keyword, group.lstrip("/").partition("@")[0], option.removesuffix(".yaml"))


def refuse_config_of_others(values: Mapping[str, object], place: str) -> None:
    """Raise a ConfigError on the config of accelerate or of another trainer, with the command that does the same."""
    first_key = next(iter(values), None)
    if {"compute_environment", "distributed_type"} & values.keys():
        start = f"accelerate launch --config_file {shlex.quote(place)} recipes/NAME.py ..."
        hint = f"{start}, where NAME is pretrain, finetune or tune"
        raise ConfigError("this is a config of accelerate", where=place, found=first_key, hint=hint)
    if "zero_optimization" in values:
        hint = _hint_for_deepspeed(values["zero_optimization"], place)
        raise ConfigError("this is a config of DeepSpeed", where=place, found=first_key, hint=hint)
    translated = _translate(values)
    overrides = [text for text in translated.values() if text is not None and _is_ready(text)]
    # A single name may be a mistake in a config of hfdist's.
    if len(overrides) > 1:
        untranslated = [name for name, text in translated.items() if text not in overrides]
        has_model = any(text.startswith(("model=", "model.name=")) for text in overrides)
        hint = f"hfdist {'finetune' if has_model else 'pretrain'} {' '.join(overrides)}"
        if untranslated:
            verb = "mean" if len(untranslated) > 1 else "means"
            hint += f"; what {', '.join(untranslated[:_MOST_SHOWN])} {verb} is to be added"
        what, found = "this is a config of another trainer", ", ".join(map(str, translated))
        raise ConfigError(what, where=place, found=found, allowed=_PAGE, hint=hint)


def _hint_for_deepspeed(section: object, place: str) -> str:
    """Write the overrides that use a DeepSpeed config, whose `zero_optimization` is `section`."""
    stage = section.get("stage") if isinstance(section, dict) else None
    file = shlex.quote(f"strategy.deepspeed={place}")
    hint = f"strategy=zero{stage if stage in (1, 2, 3) else 2} {file}, without --config"
    return hint if place.endswith(".json") else f"{hint}; as a file of JSON, whose name ends in .json"


def _translate(values: Mapping[str, object]) -> dict[str, str | None]:
    """Give an override for each name that is no section of hfdist's; None: there is none for it."""
    # Of two keys with the same last part, the first one is meant.
    key_by_leaf = {key.rpartition(".")[2]: key for key in reversed([*all_keys()]) if ANY_NAME not in key}
    translated: dict[str, str | None] = {}
    for name, value in values.items():
        if name in members(""):
            continue
        translated[name] = override_for(name, value)
        if not translated[name] and name in key_by_leaf:
            translated[name] = _override(key_by_leaf[name], value)
    datasets = values.get("datasets")
    if isinstance(datasets, list) and len(datasets) == 1 and isinstance(datasets[0], dict):
        # Axolotl lists its data under this name.
        translated["datasets"] = override_for("dataset", datasets[0].get("path"))
    return translated


def _is_ready(text: str) -> bool:
    """Whether a text is an override that can be given as it is, and neither a sentence nor one without its value."""
    return "..." not in text and "=" in text.split()[0]


def _override(key: str, value: object) -> str | None:
    """Write a value for the command line; None: it is no plain one."""
    if isinstance(value, dict | list):
        return None
    return in_shell(key, value)


def _check_name(name: str, all_groups: Mapping[str, list[str]], request: Request, where: str) -> None:
    """Raise a ConfigError where an item is the name of a config that is not there."""
    recipes = list_options(shipped_folder(), ".")
    if name in (_SELF, "run_schema") or "/" in name or request.file(name.partition("@")[0]) is not None:
        return
    groups = [group for group, options in all_groups.items() if name in options]
    hint = f"`override /{groups[0]}: {name}`" if groups else nearest(name, recipes, "`{}`", cutoff=0.6)
    allowed = f"{', '.join(recipes)}, {_SELF}, or `override /GROUP: OPTION`"
    raise ConfigError("there is no such config", where=where, found=name, allowed=allowed, hint=hint)


def _check_choice(
    choice: _Choice, recipe: str | None, groups: Mapping[str, list[str]], request: Request, where: str
) -> None:
    """Raise a ConfigError where a group or an option is not there, or an option is chosen a second time.

    `recipe` is the config of hfdist's that the list names, which has chosen an option of each group.
    """
    keyword, group, option = choice
    if group not in groups:
        allowed, hint = ", ".join(groups), nearest(group, groups, f"`override /{{}}: {option}`")
        raise ConfigError(f"there is no group `{group}`", where=where, found=group, allowed=allowed, hint=hint)
    if request.file(f"{group}/{option}") is None:
        key, _, value = (override_for_option(group, option) or "").partition("=")
        if "." in key:
            hint = f"`{in_yaml(key, value)}`, in place of this line"
        elif key in groups:
            hint = f"`override /{key}: {value}`"
        else:
            hint = nearest(option, groups[group], f"`override /{group}: {{}}`")
        raise unknown_option(group, option, groups[group], where, hint)
    if recipe is not None and not keyword and group != "experiment":
        what, hint = f"{recipe} has chosen an option of this group already", f"`override /{group}: {option}`"
        raise ConfigError(what, where=where, found=f"{group}: {option}", hint=f"{hint} at the end of the list")
