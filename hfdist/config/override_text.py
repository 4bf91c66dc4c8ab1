"""Overrides as text, with quotes where Hydra or a shell would read something else, and what Hydra reads in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

COMMAND_LINE = "command line"
"""The place of an override, in messages."""
ALLOWED = "key=value or group=option"
"""What an override may be, in messages."""


def parse_override(text: str) -> Override:
    """Read `key=value` as Hydra does; HydraException: it is none, is nested too deeply, or has too long a number."""
    try:
        return _parser().parse_override(text)
    except (RecursionError, ValueError) as error:
        raise HydraException(str(error)) from error


@cache
def _parser() -> OverridesParser:
    # To make one takes as long as to parse a short override.
    return OverridesParser.create()


def as_overrides(values: Mapping[str, object]) -> list[str]:
    """Write values by key."""
    return [as_override(key, value) for key, value in values.items()]


def as_override(key: str, value: object) -> str:
    """Write `key=value` as Hydra reads it."""
    return f"{key}={_in_place(value, of_list=False)}"


def in_shell(key: str, value: object) -> str:
    """Write `key=value` as a shell reads it, to be pasted."""
    return shlex.quote(as_override(key, value))


def as_text(value: object) -> str:
    """Write a value as the command line of a run takes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        short = f"{value:.6g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_in_place(item, of_list=True) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{as_text(name)}: {_in_place(item, of_list=True)}" for name, item in value.items())
        return f"{{{', '.join(items)}}}"
    return str(value)


def _in_place(value: object, *, of_list: bool) -> str:
    """Write a value, or an item of a list or dict; a text gets quotes where it would be read as something else."""
    if not isinstance(value, str):
        return as_text(value)
    try:
        read = parse_override(f"a=[{value}]" if of_list else f"a={value}").value()
    except HydraException:
        read = None
    return value if read == ([value] if of_list else value) else QuotedString(value, Quote.double).with_quotes()
