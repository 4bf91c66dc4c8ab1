"""Turns what Hydra and OmegaConf raise into one ConfigError: key, place, value, what is allowed, and a way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.overrides import COMMAND_LINE, GivenOverride
from hfdist.config.composition.search_path import list_groups, list_options
from hfdist.config.composition.yaml_safety import display
from hfdist.config.schema import all_keys, find_key, members, nearest_key, unknown_keys
from hfdist.errors import ConfigError

_MAX_LISTED = 40


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was to be composed."""

    config_name: str
    overrides: Sequence[GivenOverride]
    folders: tuple[Path, ...]
    """Searched in this order."""

    def groups(self) -> dict[str, list[str]]:
        """Every group with its options, over all folders."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            for group in list_groups(folder):
                found.setdefault(group, set()).update(list_options(folder, group))
        return {group: sorted(options) for group, options in found.items()}

    def file(self, config_path: str) -> Path | None:
        """The file of an option such as `optimizer/adamw`, if there is one."""
        paths = (folder / f"{config_path.removesuffix('.yaml')}.yaml" for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)


def explain(error: Exception, request: Request) -> ConfigError:
    """Translate an exception that Hydra raised while composing."""
    cause = _omegaconf_cause(error)
    override = _override_of(error, request)
    if isinstance(error, MissingConfigException):
        return _missing_config(error, request)
    if override is not None and (override.text.startswith("~") or isinstance(cause, ConfigTypeError)):
        return _bad_override(error, cause, override)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = override.key if override is not None and _is_below(override.key, cause.full_key) else cause.full_key
        value = None if override is None else override.value_text
        return unknown_key(str(key), value, _place(error, override, str(key), request), request)
    if cause is not None:
        return _bad_value(cause, error, override, request)
    group = re.match(r"(?:In '[^']+': )?Could not override '([^'@]+)", str(error))
    if group:
        override = next((o for o in request.overrides if o.key.partition("@")[0] == group[1]), None)
        value = None if override is None else override.value_text
        place = _place(error, override, group[1], request)
        if group[1] in request.groups():
            return ConfigError(
                f"the primary config `{request.config_name}` lists no group `{group[1]}`: no option can be replaced",
                where=f"{group[1]} ({place})",
                found=value,
                hint=f"single keys, such as {group[1]}.{members(group[1])[0]}=..., or --config-name pretrain"
                if members(group[1])
                else None,
            )
        return unknown_key(group[1], value, place, request)
    return _other(error, request)


def unknown_key(key: str, value: object, place: str, request: Request) -> ConfigError:
    """Say that there is no such key, and which one was probably meant."""
    section = key.rpartition(".")[0]
    where = f"{key} ({place})"
    reason = reason_against(key)
    if reason is not None:
        return ConfigError("there is no such key", where=where, found=value, hint=reason)
    groups = request.groups()
    parent = find_key(section)
    return ConfigError(
        f"there is no key `{key}`" if "." in key else f"there is no key or group `{key}`",
        where=where,
        found=value,
        allowed=f"in {section}: {', '.join(members(parent.name))}"
        if parent is not None and members(parent.name)
        else f"groups and sections: {', '.join(sorted({*groups, *members('')}))}",
        hint=_hint_for_unknown(key, value, groups),
    )


def check_keys(config: DictConfig, request: Request) -> None:
    """Refuse keys that the dataclasses do not know: `+key=value` adds them in spite of the types.

    Raises:
        ConfigError: naming the first of them.
    """
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    as_given = {override.key: override.value_text for override in request.overrides}
    for key, value in unknown_keys(values):
        raise unknown_key(key, as_given.get(key, value), COMMAND_LINE, request)


def missing_value(key: str) -> ConfigError:
    """Say that a key that stands as `???` was not given."""
    known = find_key(key)
    return ConfigError(
        "a value is missing",
        where=key,
        found="???",
        allowed=None if known is None else known.allowed,
        hint=f"{key}=... on the command line",
    )


def explain_interpolation(error: OmegaConfBaseException) -> ConfigError:
    """Translate what OmegaConf raises while it resolves `${...}`."""
    message = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '([^']+)' not found", message)
    near = nearest_key(missing[1]) if missing else None
    return ConfigError(
        f"an interpolation cannot be resolved: {message}",
        where=error.full_key or None,
        allowed="${section.key} of a key that has a value",
        hint=f"${{{near}}}" if near else None,
    )


def _missing_config(error: MissingConfigException, request: Request) -> ConfigError:
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.rpartition("/")
    group = group.lstrip("/")
    if not group:
        primaries = sorted({path for folder in request.folders for path in list_options(folder, ".")})
        return ConfigError(
            "there is no such primary config",
            where=f"--config-name ({COMMAND_LINE})" if name == request.config_name else f"defaults list: {name}",
            found=name,
            allowed=", ".join(primaries),
            hint=_close(name, primaries, "--config-name {}"),
        )
    options = request.groups().get(group, [])
    if not options:
        known = sorted(request.groups())
        near = _close(group, known, "{}")
        return ConfigError(
            f"there is no group `{group}`",
            where=_file_place(error, request) or COMMAND_LINE,
            found=name,
            allowed=", ".join(known),
            hint=None if near is None else f"{near}: {option}",
        )
    hint = _close(option, options, group + "={}") or f"add {group}/{option}.yaml to a folder and give --config-dir"
    if any((folder / f"{name}.yml").is_file() for folder in request.folders):
        hint = f"rename {option}.yml to {option}.yaml"
    return ConfigError(
        f"the group `{group}` has no option `{option}`",
        where=f"{group} ({_chooser(group, option, request) or _file_place(error, request) or COMMAND_LINE})",
        found=option,
        allowed=", ".join(options),
        hint=hint,
    )


def _chooser(group: str, option: str, request: Request) -> str | None:
    """Who chose an option: the command line, or the file of an experiment that it names."""
    for override in request.overrides:
        chosen = override.value_text.strip("'\"")
        if override.key == group and chosen == option:
            return COMMAND_LINE
        path = request.file(f"{override.key}/{chosen}")
        if path is not None and re.search(rf"{group}\s*:\s*{re.escape(option)}\b", path.read_text(encoding="utf-8")):
            return display(path)
    return None


def _bad_override(error: Exception, cause: OmegaConfBaseException | None, override: GivenOverride) -> ConfigError:
    if override.text.startswith("~"):
        return ConfigError(
            "keys cannot be deleted, only set",
            where=f"{override.key} ({COMMAND_LINE})",
            found=override.text,
            hint=f"{override.key}=... or another option of the group",
        )
    known = find_key(override.key)
    return ConfigError(
        f"this override does not fit: {str(cause or error).splitlines()[0]}",
        where=f"{override.key} ({COMMAND_LINE})",
        found=override.text,
        allowed=None if known is None else known.allowed,
    )


def _bad_value(
    cause: OmegaConfBaseException, error: Exception, override: GivenOverride | None, request: Request
) -> ConfigError:
    if isinstance(cause, InterpolationResolutionError):
        return explain_interpolation(cause)
    key = cause.full_key or (override.key if override is not None else "")
    merged = re.search(r"not a subclass of (\w+)\. value: (.*)", str(cause))
    if merged and not key:
        key = next((k.name for k in all_keys().values() if getattr(k.type, "__name__", "") == merged[1]), "")
    known = find_key(key)
    value = merged[2] if merged and cause.value is None else cause.value
    if override is not None and value in (None, {}):
        value = override.value_text
    options = request.groups().get(key, [])
    if options and isinstance(value, str):
        hint = _close(value, options, key + "={}")
    else:
        hint = None if known is None else _hint_for_value(key, value, known.allowed)
    nothing = re.search(r"not Optional|Incompatible value 'None'", str(cause)) is not None
    return ConfigError(
        "this key needs a value, not null" if nothing else "the value has the wrong type or is not among the allowed",
        where=f"{key} ({_place(error, override, key, request)})" if key else _place(error, override, key, request),
        found="null" if nothing else f"{value!r}" if isinstance(value, str) else value,
        allowed=None if known is None else known.allowed,
        hint=hint,
    )


def _other(error: Exception, request: Request) -> ConfigError:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    twice = re.match(r"(\S+) appears more than once in the final|Multiple values for (\S+)\.", message)
    if twice:
        group = (twice[1] or twice[2]).partition("@")[0]
        value = next((o.value_text for o in request.overrides if o.key == group), "...")
        return ConfigError(
            f"two options of the group `{group}` are chosen",
            where=f"{group} ({COMMAND_LINE})",
            found=f"+{group}={value}",
            hint=f"{group}={value} (without the +), or `override /{group}: {value}` in a file's defaults list",
        )
    groups = request.groups()
    for override in request.overrides:
        if override.key in groups and not isinstance(override.value, (str, list)):
            options = groups[override.key]
            return ConfigError(
                f"the group `{override.key}` has no option `{override.value_text}`",
                where=f"{override.key} ({COMMAND_LINE})",
                found=override.value_text,
                allowed=", ".join(options),
                hint=f"{override.key}={options[0]}",
            )
    return ConfigError(
        f"the config cannot be composed: {message}", where=_file_place(error, request) or request.config_name
    )


def _omegaconf_cause(error: BaseException) -> OmegaConfBaseException | None:
    """The exception of OmegaConf that knows the key, at whatever depth Hydra has wrapped it."""
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
        if re.match(rf"Could not (override|delete from config\.|delete) ?'?{re.escape(override.key)}'?", message):
            return override
    return next((o for o in request.overrides if o.text.startswith("~") and o.key in message), None)


def _is_below(key: str, ancestor: Any) -> bool:
    return isinstance(ancestor, str) and (key == ancestor or key.startswith(f"{ancestor}."))


def _place(error: Exception, override: GivenOverride | None, key: str, request: Request) -> str:
    if override is not None:
        return COMMAND_LINE
    return _file_place(error, request, key) or COMMAND_LINE


def _file_place(error: Exception, request: Request, key: str = "") -> str | None:
    """The file that Hydra names, with the line of the key where that is certain."""
    named = re.search(r"\b[Ii]n '?([\w./-]+?)'?(?=[:,])", str(error))
    path = request.file(named[1]) if named else None
    if path is None:
        return None
    leaf = re.escape(key.rpartition(".")[2])
    lines = path.read_text(encoding="utf-8").splitlines()
    hits = [number for number, line in enumerate(lines, 1) if leaf and re.match(rf"\s*(- )?{leaf}\s*:", line)]
    return f"{display(path)}, line {hits[0]}" if len(hits) == 1 else display(path)


def _hint_for_unknown(key: str, value: object, groups: dict[str, list[str]]) -> str | None:
    hint = override_for(key, value)
    if hint is not None:
        return hint
    text = "..." if value is None or isinstance(value, (dict, list)) else value
    if "." not in key:
        near = difflib.get_close_matches(key, list(groups), n=1, cutoff=0.7)
        if near:
            option = difflib.get_close_matches(str(text), groups[near[0]], n=1, cutoff=0.6)
            return f"{near[0]}={option[0] if option else groups[near[0]][0]}"
    nearest = nearest_key(key)
    known = None if nearest is None else find_key(nearest)
    if known is not None and members(known.name):
        return f"{nearest}.{members(known.name)[0]}=..."
    return None if nearest is None else f"{nearest}={text}"


def _hint_for_value(key: str, value: object, allowed: str) -> str | None:
    if allowed.startswith("a list"):
        return f"'{key}=[{value}]'"
    if isinstance(value, float) and value.is_integer() and "whole number" in allowed:
        return f"{key}={int(value)}"
    words = [word for word in allowed.replace(" or ", ", ").split(", ") if " " not in word]
    return _close(str(value), words, key + "={}")


def _close(word: str, words: list[str], template: str) -> str | None:
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return template.format(near[0]) if near else None
