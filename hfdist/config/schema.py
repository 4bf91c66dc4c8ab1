"""The keys that a config may have, read off the fields of the dataclasses, with their types, limits and sentences."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import Any, NamedTuple

from hfdist.config.ranges import LIMIT, Limit
from hfdist.config.run import RunConfig

OFF = ("false", "no", "none", "off")
"""Words that people write for none."""
ANY_NAME = "*"
"""The part of a key in the place of a name that the user chooses, as in `data.sources.*.path`."""
_NUM_KEPT = 256
"""Sections whose keys are kept: a config has some thirty, and one for each name that users give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the config: a value, a mapping or a whole section."""

    name: str
    """The full name, such as `optimizer.lr`."""
    type: Any
    """The type hint of the field, with `| None` where it has that."""
    limit: Limit | None = None
    """The limit of the value, which `Limit.accepts` checks; None: its type is the only limit."""
    owner: type | None = None
    """The dataclass that has the field."""

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def words(self) -> str | None:
        """What the key is, in words: the first paragraph of the docstring below the field; None: it has none."""
        return None if self.owner is None else _field_docstrings(self.owner).get(self.leaf)

    @property
    def is_free(self) -> bool:
        """Whether its value is a mapping with any names, such as `model.config`, whose members are no keys."""
        return typing.get_origin(self.type) is dict and _mapped_dataclass(self.type) is None

    @property
    def is_text(self) -> bool:
        """Whether its value is text."""
        return without_none(self.type).kind is str

    @property
    def takes_list(self) -> bool:
        """Whether its value may be a list."""
        kind = without_none(self.type).kind
        return kind is Any or typing.get_origin(kind) is list

    @property
    def item_type(self) -> Any:
        """The type of each value in a list or a mapping; None: the key takes neither."""
        # The last argument is that of list[ITEM], and of dict[str, ITEM].
        arguments = typing.get_args(without_none(self.type).kind)
        return arguments[-1] if arguments else None

    @property
    def allowed(self) -> str:
        """The values that the key takes, in words."""
        kind, has_none = without_none(self.type)
        words = _describe(kind) if self.limit is None else self.limit.allowed
        if self.limit is not None and kind is int:
            words = words.replace("a number", "a whole number")
        return f"{words}, or null" if has_none else words


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


def unknown_keys(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Give the full name and value of each member that the dataclasses do not know; `prefix` is before all names."""
    for leaf, value in values.items():
        name = f"{prefix}{leaf}"
        key = find_key(name)
        if key is None:
            yield name, value
        elif isinstance(value, Mapping) and not key.is_free:
            yield from unknown_keys(value, f"{name}.")


def keys_of(cls: type, prefix: str) -> Iterator[Key]:
    """Give every key of a dataclass, sections included; each name begins with `prefix`."""
    for key in direct_keys(cls, prefix):
        yield key
        if isinstance(key.type, type) and dataclasses.is_dataclass(key.type):
            yield from keys_of(key.type, f"{key.name}.")
            continue
        item = _mapped_dataclass(key.type)
        if item is not None:
            yield Key(name=f"{key.name}.{ANY_NAME}", type=item)
            yield from keys_of(item, f"{key.name}.{ANY_NAME}.")


def values_by_key(section: object, prefix: str) -> Iterator[tuple[Key, object]]:
    """Give every value of a dataclass with its key, also of those in its mappings and lists; items have numbers."""
    for key in direct_keys(type(section), prefix):
        value = getattr(section, key.leaf)
        yield key, value
        if dataclasses.is_dataclass(value):
            yield from values_by_key(value, f"{key.name}.")
            continue
        items: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for name, item in items:
            if dataclasses.is_dataclass(item):
                yield from values_by_key(item, f"{key.name}.{name}.")


def direct_keys(cls: type, prefix: str) -> Sequence[Key]:
    """Give the keys of the fields of a dataclass; each name begins with `prefix`."""
    return _kept_keys(cls, prefix)


@lru_cache(_NUM_KEPT)
def _kept_keys(cls: type, prefix: str) -> Sequence[Key]:
    hints = _type_hints(cls)
    return tuple(
        Key(name=f"{prefix}{field.name}", type=hints[field.name], limit=field.metadata.get(LIMIT), owner=cls)
        for field in dataclasses.fields(cls)
    )


@cache
def _type_hints(cls: type) -> Mapping[str, object]:
    return typing.get_type_hints(cls)


@cache
def _field_docstrings(cls: type) -> Mapping[str, str]:
    """Give the first paragraph of the docstring below each field; Python keeps none, so it is read off the source."""
    found = {}
    for field, after in itertools.pairwise(_classes_of(cls.__module__)[cls.__name__].body):
        docstring = after.value if isinstance(after, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Constant):
            paragraph, _, _ = inspect.cleandoc(str(docstring.value)).partition("\n\n")
            # The lines of the paragraph become one.
            found[ast.unparse(field.target)] = " ".join(paragraph.split())
    return found


@cache
def _classes_of(module: str) -> Mapping[str, ast.ClassDef]:
    """Parse a module once: `inspect.getsource` of a class parses all of it for each class."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


class SplitType(NamedTuple):
    """A type hint, split into what it has besides None, and whether it has None."""

    kind: Any
    """A type, a generic such as list[str], or a union of several, which is left as it was."""
    has_none: bool


def without_none(hint: object) -> SplitType:
    """Split a type hint: `int | None` is int, with None."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    rest = [part for part in parts if part is not types.NoneType]
    return SplitType(rest[0] if len(rest) == 1 else hint, len(rest) < len(parts))


def _mapped_dataclass(hint: object) -> type | None:
    """Give the dataclass of dict[str, DATACLASS]; None: the type hint is another one."""
    if typing.get_origin(hint) is not dict:
        return None
    _, item = typing.get_args(hint)
    return item if isinstance(item, type) and dataclasses.is_dataclass(item) else None


def _describe(kind: Any) -> str:
    """Say in words what values a type has, which is a dataclass, an enum, a list, a mapping or a plain type."""
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
