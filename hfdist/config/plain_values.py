"""The values of a config as YAML and JSON have them, and back; and each value under its full key."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

from hfdist.config.schema import Key, direct_keys, without_none
from hfdist.errors import ConfigError, printable

T = TypeVar("T")
_MOST_SHOWN = 200
"""Most characters of a value in a message."""


def flatten(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Give a value under its key, and all that it holds, each under its full name; items of lists have numbers."""
    yield key, value
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from flatten(item, f"{key}.{name}" if key else f"{name}")


def plain(value: object) -> Any:
    """Write dataclasses as mappings and enums as their names, so that YAML and JSON can hold them."""
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str):
        # What is resolved stays as it is: "${" in a value is text by now.
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def override_value(value: object) -> str:
    """Write a plain value as an override has it: null, true and false are not Python's."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_plain(kind: type[T], values: object, name: str = "") -> T:
    """Make a dataclass of what `plain` has given, perhaps by somebody else: nothing in it is interpolated.

    Args:
        kind: the dataclass.
        values: JSON.
        name: the section's name, for messages.

    Raises:
        ConfigError: a key that it does not have, or a value that the key does not take.
    """
    if not isinstance(values, dict):
        raise ConfigError("this is no section", where=name, found=printable(repr(values), _MOST_SHOWN))
    keys = {key.leaf: key for key in direct_keys(kind, f"{name}." if name else "")}
    unknown = next((key for key in values if key not in keys), None)
    if unknown is not None:
        found, allowed = printable(f"{unknown}", _MOST_SHOWN), ", ".join(keys)
        raise ConfigError("there is no such key", where=name, found=found, allowed=allowed)
    return kind(**{leaf: typed_value(keys[leaf].type, value, keys[leaf]) for leaf, value in values.items()})


def typed_value(hint: object, value: object, key: Key) -> object:
    """Give a plain value as its type has it; ConfigError: the key does not take it."""
    kind, is_optional = without_none(hint)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and is_optional):
        return _unescaped(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_plain(kind, value, key.name)
    if origin is list and isinstance(value, list):
        return [typed_value(inner[0], item, key) for item in value]
    if origin is dict and isinstance(value, dict):
        return {name: typed_value(inner[1], item, key) for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        made: object = kind.__members__.get(value) if isinstance(value, str) else None
    elif kind is float and type(value) is int:
        # No float is as large as some whole numbers.
        made = float(value) if abs(value) <= sys.float_info.max else None
    else:
        kinds = inner if isinstance(kind, types.UnionType) else (kind,)
        made = _unescaped(value) if type(value) in kinds else None
    if made is None or (key.limit is not None and not key.limit.accepts(made)):
        found = printable(repr(value), _MOST_SHOWN)
        raise ConfigError("this value is not possible", where=key.name, found=found, allowed=key.allowed)
    return made


def _unescaped(value: object) -> object:
    """Take back what `plain` has put before each "${"."""
    if isinstance(value, dict):
        return {name: _unescaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    return re.sub(r"(\\+)\$\{", lambda m: m[1][: len(m[1]) // 2] + "${", value) if isinstance(value, str) else value


def check_items(key: Key, value: object) -> None:
    """Refuse a list or a mapping that stands for a text or a number of a key's value: OmegaConf takes it."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    kind, is_nested = key.item_type, any(isinstance(item, list | dict) for item in items)
    if is_nested and kind is not Any and typing.get_origin(kind) is None:
        what = f"each value must be {'a number' if kind in (int, float) else 'text'}"
        raise ConfigError(what, where=key.name, found=value, allowed=key.allowed)


def accepts_text(key: Key, text: str) -> bool:
    """Whether a command line may give a key this value: text, a number or a name of its own values."""
    kind, is_optional = without_none(key.type)
    if text == "null":
        return is_optional
    if kind is str or key.is_free or key.takes_list:
        return True
    try:
        value: object = json.loads(text.lower())
    except (ValueError, RecursionError):
        value = text
    try:
        typed_value(key.type, value, key)
    except ConfigError:
        return text == "..."
    return True
