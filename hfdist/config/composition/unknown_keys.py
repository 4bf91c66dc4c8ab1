"""What is said of a key that does not exist: which one was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.options import defaults_line, overrides_in_yaml
from hfdist.config.composition.other_trainers import VALUES
from hfdist.config.composition.path_overrides import in_yaml
from hfdist.config.composition.quantities import read_quantity
from hfdist.config.composition.request import Request
from hfdist.config.likely_keys import likely_keys
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.plain_values import accepts_text
from hfdist.config.schema import find_key, members, unknown_keys
from hfdist.errors import ConfigError, nearest

_OPTION_NAMES = ("name", "type", "option", "preset", "kind")
"""Keys under which people write the option of a group: `strategy: {name: zero2}`."""


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


def check_keys(values: Mapping[str, object], request: Request) -> None:
    """Refuse keys that the dataclasses do not know: `+key=value` adds them in spite of the types.

    Args:
        values: a whole config, as plain values by section.
        request: what was asked for, for the place and the text of a value.

    Raises:
        ConfigError: there is such a key, or one in `arguments` for which hfdist has a key of its own.
    """
    as_given = {override.key: override.value_text for override in request.overrides}
    for key, value in unknown_keys(values):
        raise unknown_key(key, as_given.get(key, value), COMMAND_LINE, request)
    for section in ("train", "adapter"):
        own = values[section]
        arguments = own["arguments"] if isinstance(own, Mapping) else None
        # A reference to another section is text here.
        for name, value in arguments.items() if isinstance(arguments, Mapping) else ():
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
            # The value is a path, as in `data: {files: train.jsonl}`, and chooses no option.
            return None
        option = leaf
    return f"`{defaults_line(section, option)}` in the defaults list" if option in groups[section] else None


def _hint_for_unknown(key: str, value: object, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Give what to write in place of a key that does not exist; None: nothing is like it."""
    text = "..." if value is None or isinstance(value, (dict, list)) else str(value)
    return (
        _hint_of_other_trainer(key, value)
        or _hint_of_source(key, text)
        or _hint_of_section(key)
        or _hint_of_group(key, text, groups)
        or _hint_of_likely_keys(key, None if value is None else text)
    )


def _hint_of_other_trainer(key: str, value: object) -> str | None:
    """Give what has the name of a key in another trainer; None: it has no such name, or is a section of hfdist's."""
    is_misplaced_section = _is_misplaced_section(key) and (value is None or isinstance(value, dict))
    return None if is_misplaced_section else override_for(key, value)


def _hint_of_source(key: str, text: str) -> str | None:
    """Give the key of a source that stands one level too high, or its format under another name."""
    section, _, leaf = key.rpartition(".")
    if section == "data" and find_key(f"data.sources.files.{leaf}") is not None:
        source = "hub" if leaf in ("subset", "split", "revision") else "files"
        return f"data={source} data.sources.{source}.{leaf}={text}"
    if section.startswith("data.sources.") and leaf == "type":
        # Axolotl calls the format `type`.
        return f"{section}.format={VALUES['data.format'].get(text, text)}"
    return None


def _hint_of_section(key: str) -> str | None:
    """Say where a section belongs that stands within another one."""
    first, leaf = key.partition(".")[0], key.rpartition(".")[2]
    return f"`{leaf}:` is a section of its own, beside `{first}:`" if _is_misplaced_section(key) else None


def _is_misplaced_section(key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    return bool(section) and leaf in members("") and bool(members(leaf))


def _hint_of_group(key: str, text: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Give the group whose name is like the key's, with the option that is like the value."""
    near = None if "." in key else nearest(key, groups, cutoff=0.7)
    return None if near is None else f"{near}={nearest(text, groups[near], cutoff=0.6) or groups[near][0]}"


def _hint_of_likely_keys(key: str, value: str | None) -> str | None:
    """Give the keys whose names are like this one's, with the value; None: no key is."""
    text = "..." if value is None else value
    likely = likely_keys(key, value)
    if not likely:
        return None
    if len(likely) > 1:
        return ", or ".join(f"{near}={text}" for near in likely)
    near = likely[0]
    known, text = find_key(near), read_quantity(near, text) or text
    if known is not None and members(known.name):
        return f"{near}.{members(known.name)[0]}=..."
    section = key.rpartition(".")[0]
    is_elsewhere = find_key(section) is not None and not near.startswith(f"{section}.")
    if known is None or accepts_text(known, text):
        # The same word may mean another thing in another section.
        return f"{near}={text}, if that is meant" if is_elsewhere else f"{near}={text}"
    return None if is_elsewhere else f"{near}, which takes {known.allowed}"
