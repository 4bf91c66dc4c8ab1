"""Turns what Hydra and OmegaConf raise into one ConfigError: key, place, value, what is allowed, and a way out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from hfdist.config.composition.aliases import override_for
from hfdist.config.composition.files import display, read_config
from hfdist.config.composition.options import (
    defaults_line,
    hint_for_option,
    override_for_synonym,
    overrides_in_yaml,
    unknown_option,
)
from hfdist.config.composition.other_trainers import OWN_REWARD
from hfdist.config.composition.overrides import COMMAND_LINE, GivenOverride, hint_for_file, in_yaml
from hfdist.config.composition.request import Request
from hfdist.config.composition.unknown_keys import unknown_key
from hfdist.config.composition.value_hints import (
    REWARDS,
    allowed_for,
    hint_for_source,
    hint_for_value,
    weighted_rewards,
)
from hfdist.config.conf_folder import list_options
from hfdist.config.likely_keys import nearest_key
from hfdist.config.plain_values import flatten
from hfdist.config.schema import all_keys, find_key, members
from hfdist.errors import ConfigError, first_line, nearest


def explain(error: Exception, request: Request) -> ConfigError:
    """Translate an exception that Hydra raised while composing."""
    if isinstance(error, MissingConfigException):
        return _missing_config(error, request)
    cause = _omegaconf_cause(error)
    override = _override_of(error, request)
    if override is not None and override.text.startswith("~"):
        hint = f"{override.key}=... or another option of the group"
        where = f"{override.key} ({COMMAND_LINE})"
        return ConfigError("keys cannot be deleted, only set", where=where, found=override.text, hint=hint)
    if override is not None and isinstance(cause, ConfigTypeError):
        what, where = f"this override does not fit: {first_line(cause)}", f"{override.key} ({COMMAND_LINE})"
        allowed, names = allowed_for(override.key), str(override.value_text).strip("[]").split(",")
        way_out = weighted_rewards(names) if override.key == REWARDS else None
        return ConfigError(what, where=where, found=override.text, allowed=allowed, hint=way_out)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        if override is not None and f"{override.key}.".startswith(f"{key}."):
            # Hydra names the section that lacks it.
            key = override.key
        value = None if override is None else override.value_text
        return unknown_key(key, value, _place(error, override, key, request), request)
    if cause is not None:
        return _bad_value(cause, error, override, request)
    return _bad_group(error, request)


def missing_value(key: str) -> ConfigError:
    """Say that a key that stands as `???` was not given."""
    hint = f"{key}=... on the command line"
    return ConfigError("a value is missing", where=key, found="???", allowed=allowed_for(key), hint=hint)


def explain_interpolation(error: OmegaConfBaseException) -> ConfigError:
    """Translate what OmegaConf raises while it resolves `${...}`."""
    message = first_line(error)
    missing = re.search(r"Interpolation key '([^']+)' not found", message)
    called = (override_for(missing[1]) or "").partition("=")[0] if missing else ""
    near = called if find_key(called) else nearest_key(missing[1]) if missing else None
    if near == error.full_key:
        # It would refer to itself.
        near = None
    if missing and re.fullmatch(r"[A-Z_0-9]+", missing[1]):
        what, key = "no config reads the environment", error.full_key or None
        hint = f'{key}="${missing[1]}" on the command line, where the shell puts it in' if key else None
        return ConfigError(what, where=key, found=f"${{{missing[1]}}}", hint=hint)
    what, allowed = f"an interpolation cannot be resolved: {message}", "${section.key} of a key that has a value"
    return ConfigError(what, where=error.full_key or None, allowed=allowed, hint=f"${{{near}}}" if near else None)


def _missing_config(error: MissingConfigException, request: Request) -> ConfigError:
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
    groups, place = request.groups(), _file_place(error, request) or COMMAND_LINE
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


def _bad_value(
    cause: OmegaConfBaseException, error: Exception, override: GivenOverride | None, request: Request
) -> ConfigError:
    if isinstance(cause, InterpolationResolutionError):
        return explain_interpolation(cause)
    key, value = _key_and_value(cause, override, request)
    if key.startswith("task.rewards."):
        reward = f"{key.removeprefix('task.rewards.')}: {value}"
        what, hint = "a reward has a weight", OWN_REWARD if ".py" in reward else None
        return ConfigError(what, where="task.rewards", found=reward, allowed="{NAME: WEIGHT}", hint=hint)
    place = _place(error, override, key, request)
    is_in_file = override is None and not place.startswith(COMMAND_LINE)
    allowed, options = allowed_for(key), request.groups().get(key, [])
    of_source = None if isinstance(value, dict | list) else hint_for_source(key, str(value))
    if key.endswith("]"):
        # An entry of a list.
        hint = nearest(str(value), re.findall(r"\w+", allowed or ""), key.partition("[")[0] + "=[{}]")
    elif options and isinstance(value, str):
        hint = _hint_for_option(key, value, options, is_in_file=is_in_file)
    else:
        hint = None if allowed is None else of_source or hint_for_value(key, value, allowed)
    if hint and is_in_file:
        hint = _hint_in_file(hint, key, place, is_group=bool(options))
    what = "the value has the wrong type or is not among the allowed"
    found: object = repr(value) if isinstance(value, str) else value
    if re.search(r"not Optional|Incompatible value 'None'", str(cause)):
        what, found = "this key needs a value, not null", "null"
    elif of_source is not None and not is_in_file:
        what = "there is no source in this value: each has a name, and keys of its own"
    return ConfigError(what, where=f"{key} ({place})" if key else place, found=found, allowed=allowed, hint=hint)


def _key_and_value(
    cause: OmegaConfBaseException, override: GivenOverride | None, request: Request
) -> tuple[str, object]:
    """Find the key that does not take a value, and the value; the key is empty where nobody says it."""
    key, value = cause.full_key or (override.key if override is not None else ""), cause.value
    merged = re.search(r"not a subclass of (\w+)\. value: (.*)", str(cause))
    if merged and not key:
        key = next((k.name for k in all_keys().values() if getattr(k.type, "__name__", "") == merged[1]), "")
    if merged and value is None:
        value = merged[2]
    if override is not None and value in (None, {}):
        value = override.value_text
    if not key and "with ListConfig" in str(cause):
        return next(_lists_for_mappings(request), ("", value))
    return key, value


def _hint_for_option(group: str, option: str, options: list[str], *, is_in_file: bool) -> str | None:
    """Say what to write in place of an option that stands where the keys of its group belong."""
    hint = hint_for_file(group, option) if is_in_file else None
    hint = hint or override_for_synonym(group, option, options) or nearest(option, options, group + "={}")
    if hint is None and is_in_file and group == "model":
        return f"`{in_yaml('model.name', option)}`"
    return hint


def _hint_in_file(hint: str, key: str, place: str, *, is_group: bool) -> str:
    """Write a hint as the file at `place` has it."""
    value = hint.strip("'").removeprefix(f"{key}=")
    if value == hint.strip("'") or " " in value:
        return overrides_in_yaml(hint)
    if is_group:
        return f"`{defaults_line(key, value)}` in the defaults list of the file, in place of this line"
    return f"`{key.rpartition('.')[2]}: {value}` in {place}"


def _lists_for_mappings(request: Request) -> Iterator[tuple[str, object]]:
    """Give the keys of the primary config that have a list where names with values belong."""
    path = request.file(request.config_name)
    values = {} if path is None else read_config(path)
    for name, value in flatten(values, ""):
        known = find_key(name) if name else None
        if known is not None and isinstance(value, list) and not known.takes_list:
            yield name, value


def _bad_group(error: Exception, request: Request) -> ConfigError:
    """Translate what Hydra says of groups, and whatever else it says."""
    message, groups = first_line(error), request.groups()
    missing = re.match(r"(?:In '[^']+': )?Could not override '([^'@]+)", message)
    if missing:
        group, value = missing[1], request.value_of(missing[1])
        place = COMMAND_LINE if value is not None else _place(error, None, group, request)
        if group not in groups:
            return unknown_key(group, value, place, request)
        what = f"the primary config `{request.config_name}` lists no group `{group}`: no option can be replaced"
        keys = members(group)
        hint = f"single keys, such as {group}.{keys[0]}=..., or --config-name pretrain" if keys else None
        return ConfigError(what, where=f"{group} ({place})", found=value, hint=hint)
    twice = re.match(r"(\S+) appears more than once in the final|Multiple values for (\S+)\.", message)
    if twice:
        group = (twice[1] or twice[2]).partition("@")[0]
        what, value = f"two options of the group `{group}` are chosen", request.value_of(group)
        if value is None:
            return _twice_in_a_file(what, group, _file_place(error, request, group) or "a defaults list")
        hint = f"{group}={value} (without the +), or `override /{group}: {value}` in a file's defaults list"
        return ConfigError(what, where=f"{group} ({COMMAND_LINE})", found=f"+{group}={value}", hint=hint)
    for override in request.overrides:
        if override.key in groups and not isinstance(override.value, (str, list)):
            group, options = override.key, groups[override.key]
            option = override.value_text
            hint = override_for_synonym(group, option, options) or f"{group}={options[0]}"
            return unknown_option(group, option, options, COMMAND_LINE, hint)
    place = _file_place(error, request) or request.config_name
    late = re.search(r"Override '[^']+' is defined before '([^']+)'", message)
    if late:
        return ConfigError(
            "a line of the defaults list stands after an override",
            where=place,
            hint=f"`- {late[1]}` before the first `override`",
        )
    return ConfigError(f"the config cannot be composed: {message}", where=place)


def _twice_in_a_file(what: str, group: str, place: str) -> ConfigError:
    hint = f"`- override /{group}: OPTION` in place of `- {group}: OPTION`"
    return ConfigError(what, where=f"{group} ({place})", hint=hint)


def _omegaconf_cause(error: BaseException) -> OmegaConfBaseException | None:
    """Give the exception of OmegaConf that knows the key, at whatever depth Hydra has wrapped it."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OmegaConfBaseException) and link.full_key is not None:
            return link
        link = link.__cause__ or link.__context__
    return None


def _override_of(error: Exception, request: Request) -> GivenOverride | None:
    message = str(error)
    for override in request.overrides:
        if message.startswith(f"Error merging override {override.for_hydra}"):
            return override
        if re.match(
            rf"Could not (override|delete from config\.|delete) ?'?{re.escape(override.key)}(?![\w.])", message
        ):
            return override
    return next((o for o in request.overrides if o.text.startswith("~") and o.key in message), None)


def _place(error: Exception, override: GivenOverride | None, key: str, request: Request) -> str:
    return COMMAND_LINE if override is not None else _file_place(error, request, key) or COMMAND_LINE


def _file_place(error: Exception, request: Request, key: str = "") -> str | None:
    """Name the file that Hydra names, with the line of the key where that is certain."""
    named = re.search(r"\b[Ii]n '?([\w./-]+?)'?(?=[:,])", str(error))
    path = request.file(named[1]) if named else None
    if path is None:
        return None
    leaf = re.escape(key.rpartition(".")[2])
    lines = path.read_text(encoding="utf-8").splitlines()
    hits = [number for number, line in enumerate(lines, 1) if leaf and re.match(rf"\s*(- )?{leaf}\s*:", line)]
    return f"{display(path)}, line {hits[0]}" if len(hits) == 1 else display(path)
