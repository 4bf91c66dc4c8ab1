"""Keys that do not exist, and which was meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.options import defaults_line, overrides_in_yaml
from hfdist.config.composition.other_trainers import VALUES
from hfdist.config.composition.overrides import COMMAND_LINE, in_yaml
from hfdist.config.composition.quantities import read_quantity
from hfdist.config.composition.request import Request
from hfdist.config.likely_keys import likely_keys
from hfdist.config.plain_values import accepts_text
from hfdist.config.schema import find_key, members, unknown_keys
from hfdist.errors import ConfigError, nearest

_OPTION_NAMES = ("name", "type", "option", "preset", "kind")
"""What people call the option of a group within its section."""


def unknown_key(key: str, value: object, place: str, request: Request) -> ConfigError:
    """Say that there is no such key, and which one was probably meant."""
    where, reason, groups = f"{key} ({place})", reason_against(key), request.groups()
    if value is None and place != COMMAND_LINE:
        value = request.value_in_file(key)
    if reason is not None:
        return ConfigError("there is no such key", where=where, found=value, hint=reason)
    if find_key(key) is not None and place != COMMAND_LINE:
        what = "a key with dots is a name of its own in a file"
        return ConfigError(what, where=where, found=key, hint=f"`{in_yaml(key, '...' if value is None else value)}`")
    what = f"there is no key `{key}`" if "." in key else f"there is no key or group `{key}`"
    section = key.rpartition(".")[0]
    parent = find_key(section)
    known = [] if parent is None else members(parent.name)
    allowed = f"in {section}: {', '.join(known)}"
    if not known:
        allowed = f"groups and sections: {', '.join(sorted({*groups, *members('')}))}"
    hint = _hint_for_unknown(key, value, groups)
    if place != COMMAND_LINE:
        hint = _hint_for_section(key, request) or (None if hint is None else overrides_in_yaml(hint))
    return ConfigError(what, where=where, found=value, allowed=allowed, hint=hint)


def check_keys(values: Mapping[object, Any], request: Request) -> None:
    """Raise a ConfigError on keys that the dataclasses do not know: `+key=value` adds them in spite of the types."""
    as_given = {override.key: override.value_text for override in request.overrides}
    for key, value in unknown_keys(values):
        raise unknown_key(key, as_given.get(key, value), COMMAND_LINE, request)
    for section in ("train", "adapter"):
        given = values[section]["arguments"]
        # A reference to another section is text here.
        for name, value in given.items() if isinstance(given, Mapping) else ():
            check_argument(f"{section}.arguments.{name}", value)


def check_argument(key: str, value: object) -> None:
    """Refuse a name in `train.arguments` or `adapter.arguments` for which hfdist has a key of its own."""
    own = key.replace(".arguments.", ".")
    # Here, None is what the file says.
    given = "null" if value is None else value
    hint = override_for(key, given) or reason_against(key) or (f"{own}={value}" if find_key(own) else None)
    if hint is not None and key not in hint:
        what = "hfdist sets this argument itself, from a key of its own"
        raise ConfigError(what, where=key, found=value, hint=hint)


def _hint_for_section(key: str, request: Request) -> str | None:
    """Say what a file has in place of a misspelt section, or of an option's name within one; None: it is neither."""
    section, _, leaf = key.rpartition(".")
    if not section and override_for(key) is None:
        near = nearest(key, members(""), cutoff=0.7)
        return None if near is None else f"`{near}:` in place of `{key}:`"
    groups = request.groups()
    if section not in groups or leaf not in (*_OPTION_NAMES, *groups[section]):
        return None
    option = request.value_in_file(key)
    if leaf in groups[section]:
        if isinstance(option, str):
            # A path, such as that of `data: {files: train.jsonl}`.
            return None
        option = leaf
    return f"`{defaults_line(section, option)}` in the defaults list" if option in groups[section] else None


def _hint_for_unknown(key: str, value: object, groups: dict[str, list[str]]) -> str | None:
    section, _, leaf = key.rpartition(".")
    is_section = leaf != key and leaf in members("") and members(leaf)
    hint = override_for(key, value)
    if hint is not None and not (is_section and (value is None or isinstance(value, dict))):
        return hint
    text = "..." if value is None or isinstance(value, (dict, list)) else value
    if section == "data" and find_key(f"data.sources.files.{leaf}") is not None:
        source = "hub" if leaf in ("subset", "split", "revision") else "files"
        return f"data={source} data.sources.{source}.{leaf}={text}"
    if section.startswith("data.sources.") and leaf == "type":
        # As axolotl calls the format.
        return f"{section}.format={VALUES['data.format'].get(str(text), text)}"
    if is_section:
        return f"`{leaf}:` is a section of its own, beside `{key.partition('.')[0]}:`"
    if "." not in key:
        near = nearest(key, groups, cutoff=0.7)
        if near is not None:
            return f"{near}={nearest(str(text), groups[near], cutoff=0.6) or groups[near][0]}"
    likely = likely_keys(key, None if value is None else str(text))
    if len(likely) > 1:
        return ", or ".join(f"{near}={text}" for near in likely)
    near = next(iter(likely), None)
    known = None if near is None else find_key(near)
    if near is not None and (number := read_quantity(near, str(text))) is not None:
        text = number
    if known is not None and members(known.name):
        return f"{near}.{members(known.name)[0]}=..."
    if near is None:
        return None
    if find_key(section) is not None and not near.startswith(f"{section}."):
        # The same word may mean another thing in another section.
        return f"{near}={text}, if that is meant" if known is None or accepts_text(known, str(text)) else None
    return (
        f"{near}={text}" if known is None or accepts_text(known, str(text)) else f"{near}, which takes {known.allowed}"
    )
