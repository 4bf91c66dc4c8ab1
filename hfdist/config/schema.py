"""Every key that a config may have, read off the dataclasses: for hints, for ranges and for unknown keys."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from hfdist.config.ranges import LIMIT, Limit
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest, printable

T = TypeVar("T")
OFF = ("false", "no", "none", "off")
"""What people write for none."""
ANY_NAME = "*"
"""Stands in a key for a name that the user chooses, as in `data.sources.*.path`."""


_MOST_SHOWN = 200
_MOST_LIKELY = 3
_MOST_LETTERS = 2
"""By how many letters a slip of the pen makes a word longer or shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the config: a value, a mapping or a whole section."""

    name: str
    type: Any
    limit: Limit | None = None
    owner: type | None = None
    """The dataclass that has the field."""

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def words(self) -> str | None:
        """What it is: the first paragraph of the docstring below the field; None: it has none."""
        return None if self.owner is None else _field_docstrings(self.owner).get(self.leaf)

    @property
    def is_free(self) -> bool:
        """Whether its members are not ours: a mapping of anything, or of values by names of the user's."""
        return typing.get_origin(self.type) is dict and not dataclasses.is_dataclass(typing.get_args(self.type)[1])

    @property
    def is_text(self) -> bool:
        """Whether its value is text."""
        return _without_none(self.type)[0] is str

    @property
    def takes_list(self) -> bool:
        """Whether its value may be a list."""
        kind = _without_none(self.type)[0]
        return kind is Any or typing.get_origin(kind) is list

    @property
    def allowed(self) -> str:
        """The values that it takes, in words."""
        kind, optional = _without_none(self.type)
        if self.limit is not None:
            words = self.limit.allowed.replace("a number", "a whole number" if kind is int else "a number")
        else:
            words = _describe(kind)
        return f"{words}, or null" if optional else words

    def accepts(self, text: str) -> bool:
        """Whether a command line may give it this value: text, a number or a name of its own values."""
        kind, is_optional = _without_none(self.type)
        if text == "null":
            return is_optional
        if kind is str or self.is_free or self.takes_list:
            return True
        try:
            _typed(self.type, text if issubclass(kind, Enum) else json.loads(text.lower()), self)
        except (ConfigError, ValueError, TypeError):
            return text == "..."
        return True


@cache
def all_keys() -> Mapping[str, Key]:
    """Give every key by its full name, sections included, in the order of the dataclasses."""
    return types.MappingProxyType({key.name: key for key in keys_of(RunConfig, "")})


def find_key(name: str) -> Key | None:
    """Look up a full key; the names that users give to sources count as `*`."""
    keys = all_keys()
    if name in keys:
        return keys[name]
    parts = name.split(".")
    for index in range(1, len(parts)):
        starred = ".".join([*parts[:index], ANY_NAME, *parts[index + 1 :]])
        if starred in keys:
            return keys[starred]
    return None


def members(name: str) -> list[str]:
    """Give the names directly below a section ("" is the root)."""
    prefix = f"{name}." if name else ""
    return [key.leaf for key in all_keys().values() if key.name == prefix + key.leaf]


def unknown_keys(values: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Give the full name and value of each member that the dataclasses do not know."""
    for leaf, value in values.items():
        name = f"{prefix}{leaf}"
        key = find_key(name)
        if key is None:
            yield name, value
        elif isinstance(value, Mapping) and not key.is_free:
            yield from unknown_keys(value, f"{name}.")


def nearest_key(name: str) -> str | None:
    """Give the key that was probably meant; None: no key is like it."""
    return next(iter(likely_keys(name)), None)


def likely_keys(name: str, value: str | None = None) -> list[str]:
    """Give the keys that may be meant: the same last part elsewhere, longer names in the section, or a slip of the pen.

    Of a section's keys that say more, such as `warmup_steps` and `warmup_fraction`, those that accept `value`.
    """
    respelt = _respell(name)
    if respelt is not None:
        return [respelt]
    names = [key.name for key in all_keys().values() if ANY_NAME not in key.name]
    section, _, leaf = name.rpartition(".")
    own = members(_starred(section)) if section else []
    longer = [f"{section}.{member}" for member in own if f"_{leaf}_" in f"_{member}_"]
    if found := [one for one in longer if value is None or ((key := find_key(one)) is not None and key.accepts(value))]:
        return found[:_MOST_LIKELY]
    same_leaf = [known for known in names if known.rpartition(".")[2] == leaf]
    # Names of two things are often as alike as `max_samples` and `max_staleness`, or `modules` and `nodes`.
    by_leaf = {known.rpartition(".")[2]: known for known in reversed(names)} if not own else {}
    by_leaf |= {member: f"{section}.{member}" for member in own}
    close = nearest(leaf, [one for one in by_leaf if _may_be_slip(leaf, one)], cutoff=0.78)
    near = nearest(name, same_leaf, cutoff=0.0) or (None if close is None else by_leaf[close])
    return [] if near is None else [near]


def _may_be_slip(written: str, meant: str) -> bool:
    return abs(len(written) - len(meant)) <= _MOST_LETTERS and written[:1].lower() == meant[:1].lower()


def flatten(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Give a value under its key, and all that it holds, each under its full name; items of lists have numbers."""
    yield key, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from flatten(item, f"{key}.{name}".lstrip("."))


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


def in_override(value: object) -> str:
    """Write a plain value as an override has it: null, true and false are not Python's."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def from_plain(kind: type[T], values: object, name: str = "") -> T:
    """Make a dataclass of what `plain` has given, perhaps by somebody else: nothing in it is interpolated.

    Args:
        kind: the dataclass.
        values: JSON.
        name: of the section, in messages.

    Raises:
        ConfigError: a key that it does not have, or a value that the key does not take.
    """
    if not isinstance(values, dict):
        raise ConfigError("this is no section", where=name, found=printable(repr(values), _MOST_SHOWN))
    keys = {key.leaf: key for key in _direct_keys(kind, f"{name}." if name else "")}
    unknown = next((key for key in values if key not in keys), None)
    if unknown is not None:
        found, allowed = printable(f"{unknown}", _MOST_SHOWN), ", ".join(keys)
        raise ConfigError("there is no such key", where=name, found=found, allowed=allowed)
    return kind(**{leaf: _typed(keys[leaf].type, value, keys[leaf]) for leaf, value in values.items()})


def _typed(hint: object, value: object, key: Key) -> object:
    kind, is_optional = _without_none(hint)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and is_optional):
        return _unescaped(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_plain(kind, value, key.name)
    if origin is list and isinstance(value, list):
        return [_typed(inner[0], item, key) for item in value]
    if origin is dict and isinstance(value, dict):
        return {name: _typed(inner[1], item, key) for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        made: object = kind.__members__.get(value) if isinstance(value, str) else None
    elif kind is float and type(value) is int:
        made = float(value)
    else:
        made = _unescaped(value) if type(value) is kind else None
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


def _respell(name: str) -> str | None:
    """Correct the first part that is unknown, if that makes the whole name known."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        section = ".".join(parts[:index])
        if find_key(".".join(parts[: index + 1])) is None:
            member = nearest(part, members(_starred(section)), cutoff=0.7)
            if member is None:
                return None
            fixed = ".".join([*parts[:index], member, *parts[index + 1 :]])
            parent = find_key(".".join([*parts[:index], member]))
            return fixed if find_key(fixed) is not None or (parent is not None and parent.is_free) else None
    return None


def _starred(section: str) -> str:
    key = find_key(section)
    return section if key is None else key.name


def keys_of(cls: Any, prefix: str) -> Iterator[Key]:
    """Give every key of a dataclass, sections included; each name begins with `prefix`."""
    for key in _direct_keys(cls, prefix):
        yield key
        if dataclasses.is_dataclass(key.type):
            yield from keys_of(key.type, f"{key.name}.")
        elif typing.get_origin(key.type) is dict and dataclasses.is_dataclass(typing.get_args(key.type)[1]):
            item = typing.get_args(key.type)[1]
            yield Key(name=f"{key.name}.{ANY_NAME}", type=item)
            yield from keys_of(item, f"{key.name}.{ANY_NAME}.")


def values_by_key(section: object, prefix: str) -> Iterator[tuple[Key, object]]:
    """Give every value of a dataclass with its key, also of those in its mappings and lists; items have numbers."""
    for key in _direct_keys(type(section), prefix):
        value = getattr(section, key.leaf)
        yield key, value
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        inner = {f"{key.name}.": value} | {f"{key.name}.{name}.": item for name, item in items}
        for name, item in inner.items():
            if dataclasses.is_dataclass(item):
                yield from values_by_key(item, name)


def _direct_keys(cls: type, prefix: str) -> Iterator[Key]:
    hints = _type_hints(cls)
    for field in dataclasses.fields(cls):
        yield Key(name=f"{prefix}{field.name}", type=hints[field.name], limit=field.metadata.get(LIMIT), owner=cls)


@cache
def _field_docstrings(cls: type) -> Mapping[str, str]:
    """Give the first paragraph of the docstring below each field; Python keeps none, so it is read off the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, after in itertools.pairwise(body):
        words = after.value if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) else None
        if isinstance(words, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(inspect.cleandoc(str(words.value)).partition("\n\n")[0].split())
    return found


@cache
def _type_hints(cls: type) -> Mapping[str, object]:
    return typing.get_type_hints(cls)


def _without_none(hint: object) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def _describe(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(member.name for member in kind)
    if dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(field.name for field in dataclasses.fields(kind))}"
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        is_enum = isinstance(inner, type) and issubclass(inner, Enum)
        return f"a list of {_describe(inner)}" if is_enum else "a list, such as [first,second]"
    if typing.get_origin(kind) is dict:
        return "a mapping, such as {name: value}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words[kind]
