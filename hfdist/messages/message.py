"""A message: a JSON object of bounded size, depth and kinds of values. All else is no message, whatever it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 2**22
"""Most bytes of a line. What is larger follows the line as bytes."""
_MOST_DEPTH = 32
_INTEGERS = range(-(2**63), 2**64)
"""Integers that 64 bits hold, with a sign or without: seeds and hashes have none."""
_MOST_COUNT = 2**53
_MISSING: Any = object()


class NotAMessageError(ValueError):
    """Bytes that nobody of hfdist would send. Who sends them is not heard any more."""

    def __init__(self, why: str) -> None:
        super().__init__(f"not a message: {why}")


class RefusedError(Exception):
    """The other side is not let in.

    Args:
        answer: what it is told: `refused`, and perhaps `key`, `found`, `allowed`, `may_pass`.
    """

    def __init__(self, /, **answer: object) -> None:
        super().__init__(str(answer.get("refused")))
        self.answer = answer


class Message(dict[str, Any]):
    """The members of a JSON object, taken by their kinds. NotAMessageError: one is missing, or of another kind."""

    def integer(self, key: str, *, least: int = 0, most: int = _MOST_COUNT, default: int = _MISSING) -> int:
        """Take a whole number between two others."""
        value = self._take(key, default)
        if type(value) is not int or not least <= value <= most:
            raise NotAMessageError(f"{key} is no whole number from {least} to {most}")
        return value

    def integers(self, key: str) -> list[int]:
        """Take a list of whole numbers from 0."""
        values = self.list(key)
        if not all(type(value) is int and 0 <= value <= _MOST_COUNT for value in values):
            raise NotAMessageError(f"{key} is no list of whole numbers from 0 to {_MOST_COUNT}")
        return values

    def number(self, key: str, *, least: float = 0.0) -> float:
        """Take a finite number."""
        value = self._take(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value < least:
            raise NotAMessageError(f"{key} is no finite number from {least:g}")
        return float(value)

    def text(self, key: str, *, most: int = 1024) -> str:
        """Take a text of so many characters at most."""
        value = self._take(key)
        if type(value) is not str or len(value) > most:
            raise NotAMessageError(f"{key} is no text of at most {most} characters")
        return value

    def flag(self, key: str) -> bool:
        """Take true or false."""
        value = self._take(key)
        if type(value) is not bool:
            raise NotAMessageError(f"{key} is neither true nor false")
        return value

    def list(self, key: str) -> list[Any]:
        """Take a list of anything."""
        value = self._take(key)
        if type(value) is not list:
            raise NotAMessageError(f"{key} is no list")
        return value

    def mapping(self, key: str) -> Message:
        """Take an object."""
        value = self._take(key)
        if not isinstance(value, dict):
            raise NotAMessageError(f"{key} is no object")
        return Message(value)

    def by_number(self, key: str) -> dict[int, object]:
        """Take an object whose keys are whole numbers from 0, each written in one way."""
        found = self.mapping(key)
        if not all(re.fullmatch(r"0|[1-9]\d{0,18}", name, re.ASCII) for name in found):
            raise NotAMessageError(f"{key} has a key that is no whole number")
        return {int(name): value for name, value in found.items()}

    def _take(self, key: str, default: object = _MISSING) -> Any:
        if key not in self and default is _MISSING:
            raise NotAMessageError(f"there is no {key}")
        return self.get(key, default)


def read_json(content: bytes, most_bytes: int = MOST_BYTES) -> object:
    """Read JSON that somebody else has written.

    Raises:
        NotAMessageError: it is none; or it is too long, too deep, or has a number or a text that none should have.
    """
    if len(content) > most_bytes:
        raise NotAMessageError(f"it is longer than {most_bytes} bytes")
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise NotAMessageError(type(error).__name__) from error
    level: list[object] = [value]
    for _ in range(_MOST_DEPTH):
        below: list[object] = []
        for one in level:
            _check(one)
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list):
                below += one
        if not below:
            return value
        level = below
    raise NotAMessageError(f"it is deeper than {_MOST_DEPTH}")


def _check(value: object) -> None:
    if type(value) is int and value not in _INTEGERS:
        raise NotAMessageError("a number is too large")
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise NotAMessageError("a text is no text") from error


def read_message(content: bytes, most_bytes: int = MOST_BYTES) -> Message:
    """Read a line; NotAMessageError: it is none. See `read_json`."""
    return as_message(read_json(content, most_bytes))


def as_message(value: object) -> Message:
    """Give a JSON object; NotAMessageError: the value is none."""
    if not isinstance(value, dict):
        raise NotAMessageError("it is no object")
    return Message(value)


def write_message(message: Mapping[str, object], num_bytes: int = 0) -> bytes:
    """Give the line of a message; so many bytes are to follow it."""
    counted = dict(message) | ({"bytes": num_bytes} if num_bytes else {})
    return json.dumps(counted).encode() + b"\n"
