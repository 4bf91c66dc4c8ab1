"""Translation of Hydra's and OmegaConf's errors about keys and values: each becomes a ConfigError with a way out."""

from __future__ import annotations

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
from hfdist.config.composition.files import read_config
from hfdist.config.composition.group_errors import explain_group, explain_missing_config
from hfdist.config.composition.options import (
    defaults_line,
    override_for_synonym,
    overrides_in_yaml,
)
from hfdist.config.composition.other_trainers import OWN_REWARD
from hfdist.config.composition.overrides import GivenOverride
from hfdist.config.composition.path_overrides import hint_for_file, in_yaml
from hfdist.config.composition.request import Request
from hfdist.config.composition.unknown_keys import unknown_key
from hfdist.config.composition.value_hints import (
    REWARDS,
    allowed_for,
    hint_for_source,
    hint_for_value,
    weighted_rewards,
)
from hfdist.config.likely_keys import nearest_key
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.plain_values import flatten
from hfdist.config.schema import all_keys, find_key
from hfdist.errors import ConfigError, first_line, nearest


def explain(error: Exception, request: Request) -> ConfigError:
    """Translate an exception that Hydra raised while composing."""
    if isinstance(error, MissingConfigException):
        return explain_missing_config(error, request)
    cause = _omegaconf_cause(error)
    override = _override_of(error, request)
    if override is not None and override.text.startswith("~"):
        hint = f"{override.key}=... or another option of the group"
        where = f"{override.key} ({COMMAND_LINE})"
        return ConfigError("keys cannot be deleted, only set", where=where, found=override.text, hint=hint)
    if override is not None and isinstance(cause, ConfigTypeError):
        return _misfit_of(override, cause)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        if override is not None and f"{override.key}.".startswith(f"{key}."):
            # Hydra names the section that lacks it.
            key = override.key
        value = None if override is None else override.value_text
        return unknown_key(key, value, _place(error, override, key, request), request)
    if cause is not None:
        return _bad_value(cause, error, override, request)
    return explain_group(error, request)


def _misfit_of(override: GivenOverride, cause: ConfigTypeError) -> ConfigError:
    """Make the error of an override of another shape, such as a text for a mapping."""
    hint = None
    if override.key == REWARDS:
        hint = weighted_rewards(override.value_text.strip("[]").split(","))
    return ConfigError(
        f"this override does not fit: {first_line(cause)}",
        where=f"{override.key} ({COMMAND_LINE})",
        found=override.text,
        allowed=allowed_for(override.key),
        hint=hint,
    )


def missing_value(key: str) -> ConfigError:
    """Make the error of a key whose value is `???`: it must be given, and was not."""
    hint = f"{key}=... on the command line"
    return ConfigError("a value is missing", where=key, found="???", allowed=allowed_for(key), hint=hint)


def explain_interpolation(error: OmegaConfBaseException) -> ConfigError:
    """Translate what OmegaConf raises while it resolves `${...}`."""
    message, key = first_line(error), error.full_key or None
    missing = re.search(r"Interpolation key '([^']+)' not found", message)
    name = missing[1] if missing else None
    if name is not None and re.fullmatch(r"[A-Z_0-9]+", name):
        # A name in capitals is one of the environment.
        hint = f'{key}="${name}" on the command line, where the shell puts it in' if key else None
        return ConfigError("no config reads the environment", where=key, found=f"${{{name}}}", hint=hint)
    likely = _likely_key(name) if name is not None else None
    # A key that referred to itself would be no help.
    hint = f"${{{likely}}}" if likely and likely != error.full_key else None
    what, allowed = f"an interpolation cannot be resolved: {message}", "${section.key} of a key that has a value"
    return ConfigError(what, where=key, allowed=allowed, hint=hint)


def _likely_key(name: str) -> str | None:
    """Give the key that was probably meant by a name: by that of another trainer, or by its letters."""
    translated = (override_for(name) or "").partition("=")[0]
    return translated if find_key(translated) else nearest_key(name)


def _bad_value(
    cause: OmegaConfBaseException, error: Exception, override: GivenOverride | None, request: Request
) -> ConfigError:
    """Make the error of a value that its key does not take."""
    if isinstance(cause, InterpolationResolutionError):
        return explain_interpolation(cause)
    key, value = _key_and_value(cause, override, request)
    if key.startswith("task.rewards."):
        reward = f"{key.removeprefix('task.rewards.')}: {value}"
        what, hint = "a reward has a weight", OWN_REWARD if ".py" in reward else None
        return ConfigError(what, where="task.rewards", found=reward, allowed="{NAME: WEIGHT}", hint=hint)
    place = _place(error, override, key, request)
    is_in_file = override is None and not place.startswith(COMMAND_LINE)
    source_hint = None if isinstance(value, dict | list) else hint_for_source(key, str(value))
    what = "the value has the wrong type or is not among the allowed"
    found: object = repr(value) if isinstance(value, str) else value
    if re.search(r"not Optional|Incompatible value 'None'", str(cause)):
        what, found = "this key needs a value, not null", "null"
    elif source_hint is not None and not is_in_file:
        what = "there is no source in this value: each has a name, and keys of its own"
    hint = _hint_for_bad_value(key, value, source_hint, request, is_in_file=is_in_file)
    if hint and is_in_file:
        hint = _hint_in_file(hint, key, place, is_group=bool(request.groups().get(key)))
    where = f"{key} ({place})" if key else place
    return ConfigError(what, where=where, found=found, allowed=allowed_for(key), hint=hint)


def _hint_for_bad_value(
    key: str, value: object, source_hint: str | None, request: Request, *, is_in_file: bool
) -> str | None:
    """Give the override that was probably meant, for an entry of a list, an option of a group, or a key's value."""
    allowed, options = allowed_for(key), request.groups().get(key, [])
    if key.endswith("]"):
        # The key is that of an entry, such as `report.to[0]`.
        words = re.findall(r"\w+", allowed or "")
        return nearest(str(value), words, key.partition("[")[0] + "=[{}]")
    if options and isinstance(value, str):
        return _hint_for_option(key, value, options, is_in_file=is_in_file)
    if allowed is None:
        return None
    return source_hint or hint_for_value(key, value, allowed)


def _key_and_value(
    cause: OmegaConfBaseException, override: GivenOverride | None, request: Request
) -> tuple[str, object]:
    """Find the key that does not take a value, and the value; the key is empty where nobody says it."""
    key, value = cause.full_key or "", cause.value
    if not key and override is not None:
        key = override.key
    # OmegaConf names a dataclass in place of the key, where it merges a whole section.
    merged = re.search(r"not a subclass of (?P<section>\w+)\. value: (?P<value>.*)", str(cause))
    if merged and not key:
        sections = (known for known in all_keys().values() if getattr(known.type, "__name__", "") == merged["section"])
        section = next(sections, None)
        key = "" if section is None else section.name
    if merged and value is None:
        value = merged["value"]
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


def _omegaconf_cause(error: BaseException) -> OmegaConfBaseException | None:
    """Give the exception of OmegaConf that knows the key, at whatever depth Hydra has wrapped it."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OmegaConfBaseException) and link.full_key is not None:
            return link
        link = link.__cause__ or link.__context__
    return None


def _override_of(error: Exception, request: Request) -> GivenOverride | None:
    """Find the override that an error is about, by Hydra's words; None: it is about a file, or nothing says so."""
    message = str(error)
    for override in request.overrides:
        if message.startswith(f"Error merging override {override.for_hydra}"):
            return override
        if re.match(
            rf"Could not (override|delete from config\.|delete) ?'?{re.escape(override.key)}(?![\w.])", message
        ):
            return override
    deletions = (override for override in request.overrides if override.text.startswith("~"))
    return next((override for override in deletions if override.key in message), None)


def _place(error: Exception, override: GivenOverride | None, key: str, request: Request) -> str:
    """Say where a mistake is: the file that the error names, with its line, or else the command line."""
    if override is not None:
        return COMMAND_LINE
    return request.place_named(str(error), key) or COMMAND_LINE
