"""Checks of the values in a row, for formats: a text must be a text, and a list may be written as JSON."""

from __future__ import annotations

import json
from typing import NoReturn, TypeVar, cast

from hfdist.data.sources.base import ContentError

T = TypeVar("T")
_SHOWN_CHARACTERS = 80


def refuse(what: str, part: str, found: object, allowed: str) -> NoReturn:
    """Raise the ContentError, without its `where`, of a value that was found in a part of a row, such as `tags[2]`."""
    shown = None if found is None else f"{found!r:.{_SHOWN_CHARACTERS}}"
    raise ContentError(f"{what}: {part}", found=shown, allowed=allowed)


def text_of(value: object, part: str) -> str:
    """Give a value that must be a text; ContentError: it is none."""
    if not isinstance(value, str):
        refuse("this is no text", part, value, "a string")
    return value


def written_text(value: object, part: str) -> str:
    """Give a value that must be a text with more than white space; ContentError: it is none."""
    text = text_of(value, part)
    if not text.strip():
        refuse("the text is empty", part, text, "a text with letters")
    return text


def written_texts(value: object, part: str) -> list[str]:
    """Give a list of texts with more than white space; a single text is a list of one. ContentError: it is none."""
    if isinstance(value, str):
        return [written_text(value, part)]
    return [written_text(item, f"{part}[{number}]") for number, item in enumerate(list_of(value, part))]


def list_of(value: object, part: str) -> list[object]:
    """Give a value that must be a list, or a list written as JSON; ContentError: it is none."""
    value = parsed(value)
    if not isinstance(value, list):
        refuse("this is no list", part, value, "a list")
    return value


def parsed(value: object) -> object:
    """Give the list or the object that a text has as JSON; any other value stays as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list | dict) else value


def without_nulls(value: T) -> T:
    """Leave out the keys whose value is null, at every depth: a table gives each object the keys of all rows."""
    found: object = value
    if isinstance(value, dict):
        found = {name: without_nulls(item) for name, item in value.items() if item is not None}
    elif isinstance(value, list):
        found = [without_nulls(item) for item in value]
    return cast(T, found)
