"""Translation of Hydra's errors about groups and their options: each becomes a ConfigError with a way out."""

from __future__ import annotations

import os
import re

from hydra.errors import MissingConfigException

from hfdist.config.composition.files import display
from hfdist.config.composition.options import hint_for_option, override_for_synonym, unknown_option
from hfdist.config.composition.request import Request
from hfdist.config.composition.unknown_keys import unknown_key
from hfdist.config.conf_folder import list_options
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.schema import members
from hfdist.errors import ConfigError, first_line, nearest


def explain_missing_config(error: MissingConfigException, request: Request) -> ConfigError:
    """Say which primary config, group or option is not there, and which was probably meant."""
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.rpartition("/")
    group = group.lstrip("/")
    if not group:
        names = {path for folder in request.folders for path in list_options(folder, ".")}
        where = f"--config-name ({COMMAND_LINE})" if name == request.config_name else f"defaults list: {name}"
        hint = nearest(name, sorted(names), "--config-name {}")
        what, allowed = "there is no such primary config", ", ".join(sorted(names))
        return ConfigError(what, where=where, found=name, allowed=allowed, hint=hint)
    if name == request.config_name and os.path.isfile(f"{name}.yaml"):
        what, hint = "a primary config by its name lies in the folder of --config-dir", f"--config {name}.yaml"
        return ConfigError(what, where=f"--config-name ({COMMAND_LINE})", found=name, hint=hint)
    groups, place = request.groups(), request.place_named(str(error)) or COMMAND_LINE
    options = groups.get(group, [])
    if not options:
        hint = nearest(group, sorted(groups), f"{{}}: {option}")
        return ConfigError(
            f"there is no group `{group}`", where=place, found=name, allowed=", ".join(sorted(groups)), hint=hint
        )
    if any(os.path.isfile(folder / f"{name}.yml") for folder in request.folders):
        hint = f"rename {option}.yml to {option}.yaml"
    else:
        own = f"add {group}/{option}.yaml to a folder and give --config-dir"
        hint = hint_for_option(group, option, options) or own
    return unknown_option(group, option, options, _chooser(group, option, request) or place, hint)


def _chooser(group: str, option: str, request: Request) -> str | None:
    """Name who chose an option: the command line, or the file of an experiment that it names."""
    for override in request.overrides:
        chosen = override.value_text.strip("'\"")
        if override.key == group and chosen == option:
            return COMMAND_LINE
        path = request.file(f"{override.key}/{chosen}")
        if path is not None and re.search(rf"{group}\s*:\s*{re.escape(option)}\b", path.read_text(encoding="utf-8")):
            return display(path)
    return None


def explain_group(error: Exception, request: Request) -> ConfigError:
    """Translate what Hydra says of groups, and whatever else it says."""
    message = first_line(error)
    missing = re.match(r"(?:In '[^']+': )?Could not override '([^'@]+)", message)
    if missing:
        return _not_listed(missing[1], error, request)
    twice = re.match(r"(\S+) appears more than once in the final|Multiple values for (\S+)\.", message)
    if twice:
        group, _, _ = (twice[1] or twice[2]).partition("@")
        return _chosen_twice(group, error, request)
    misfit = _misfit_option(request)
    if misfit is not None:
        return misfit
    place = request.place_named(str(error)) or request.config_name
    late = re.search(r"Override '[^']+' is defined before '([^']+)'", message)
    if late:
        what = "a line of the defaults list stands after an override"
        hint = f"`- {late[1]}` before the first `override`"
        return ConfigError(what, where=place, hint=hint)
    return ConfigError(f"the config cannot be composed: {message}", where=place)


def _not_listed(group: str, error: Exception, request: Request) -> ConfigError:
    """Make the error of a choice in a group that the primary config does not list, or that is no group."""
    value = request.value_of(group)
    place = COMMAND_LINE
    if value is None:
        place = request.place_named(str(error), group) or COMMAND_LINE
    if group not in request.groups():
        return unknown_key(group, value, place, request)
    what = f"the primary config `{request.config_name}` lists no group `{group}`: no option can be replaced"
    keys = members(group)
    hint = f"single keys, such as {group}.{keys[0]}=..., or --config-name pretrain" if keys else None
    return ConfigError(what, where=f"{group} ({place})", found=value, hint=hint)


def _chosen_twice(group: str, error: Exception, request: Request) -> ConfigError:
    """Make the error of two options of one group, the second by `+` on the command line or by a line in a file."""
    what, value = f"two options of the group `{group}` are chosen", request.value_of(group)
    if value is None:
        place = request.place_named(str(error), group) or "a defaults list"
        hint = f"`- override /{group}: OPTION` in place of `- {group}: OPTION`"
        return ConfigError(what, where=f"{group} ({place})", hint=hint)
    hint = f"{group}={value} (without the +), or `override /{group}: {value}` in a file's defaults list"
    return ConfigError(what, where=f"{group} ({COMMAND_LINE})", found=f"+{group}={value}", hint=hint)


def _misfit_option(request: Request) -> ConfigError | None:
    """Make the error of an override that gives a group a number or a mapping; None: there is no such override."""
    groups = request.groups()
    for override in request.overrides:
        if override.key in groups and not isinstance(override.value, (str, list)):
            group, option, options = override.key, override.value_text, groups[override.key]
            hint = override_for_synonym(group, option, options) or f"{group}={options[0]}"
            return unknown_option(group, option, options, COMMAND_LINE, hint)
    return None
