"""Values of a row as formats need them: texts, and lists that may come as JSON; a value of another kind is refused."""

from __future__ import annotations

import json
from typing import NoReturn, TypeVar, cast

from hfdist.data.sources.base import ContentError

T = TypeVar("T")
_SHOWN_CHARACTERS = 80


def refuse(what: str, part: str, found: object, allowed: str) -> NoReturn:
    """Raise a ContentError, without its `where`, of a part of a row."""
    shown = None if found is None else f"{found!r:.{_SHOWN_CHARACTERS}}"
    raise ContentError(f"{what}: {part}", found=shown, allowed=allowed)


def text_of(value: object, part: str) -> str:
    """Give a value that must be a text."""
    if not isinstance(value, str):
        refuse("this is no text", part, value, "a string")
    return value


def written_text(value: object, part: str) -> str:
    """Give a value that must be a text with more than white space."""
    text = text_of(value, part)
    if not text.strip():
        refuse("the text is empty", part, text, "a text with letters")
    return text


def written_texts(value: object, part: str) -> list[str]:
    """Give a list of such texts; a single one is a list of one."""
    if isinstance(value, str):
        return [written_text(value, part)]
    return [written_text(item, f"{part}[{number}]") for number, item in enumerate(list_of(value, part))]


def list_of(value: object, part: str) -> list[object]:
    """Give a value that must be a list, also where it comes as JSON."""
    value = parsed(value)
    if not isinstance(value, list):
        refuse("this is no list", part, value, "a list")
    return value


def parsed(value: object) -> object:
    """Give a list or an object, also where it comes as JSON; all else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list | dict) else value


def without_nulls(value: T) -> T:
    """Leave out the keys whose value is null, at every depth: tables give each object the keys of all rows."""
    found: object = value
    if isinstance(value, dict):
        found = {name: without_nulls(item) for name, item in value.items() if item is not None}
    elif isinstance(value, list):
        found = [without_nulls(item) for item in value]
    return cast(T, found)
