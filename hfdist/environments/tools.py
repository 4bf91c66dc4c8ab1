"""Calls of tools: found in the text of a turn, checked, done, and their results as texts.

The plain form, for tokenizers without a template of responses, is that of Hermes and Qwen:

    <tool_call>{"name": "multiply", "arguments": {"first": 2, "second": 3}}</tool_call>
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hfdist.environments.environment import ToolError
from hfdist.errors import ConfigError, first_line

_BEGIN, _END = "<tool_call>", "</tool_call>"
MOST_CALLS = 16
"""The most calls of a turn that are done."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
"""Types of Python by the names that JSON schemas have for them."""

Tool = Callable[..., object]
Schema = dict[str, Any]


class Call(NamedTuple):
    """A tool and its arguments, as the model has written them."""

    name: str
    """Empty: the call could not be read."""
    arguments: Mapping[str, object]


_UNREADABLE = Call("", {})


def describe_tools(tools: Sequence[Tool], *, where: str, found: str) -> list[Schema]:
    """Give the JSON schema of each tool, as transformers makes it for chat templates.

    ConfigError, of the key `where` and its value `found`: a type hint or a line of a docstring is missing.
    """
    # Imported here: it imports torch.
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # it raises many kinds
            name = getattr(tool, "__name__", repr(tool))
            what = f"the tool {name} cannot be offered to a model: {first_line(error)}"
            allowed = "a function with type hints and a docstring that describes each argument (`Args:`)"
            raise ConfigError(what, where=where, found=found, allowed=allowed) from error
    return schemas


def find_calls(text: str) -> list[Call]:
    """Find the calls in a text of the plain form, in their order."""
    # Split, as a pattern would look for the end again from each beginning that a model repeats.
    parts = [part.partition(_BEGIN) for part in text.split(_END)[:-1]]
    return [_read(written) for _, begin, written in parts if begin]


def _read(written: str) -> Call:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        value = None
    return as_call(value)


def as_call(value: object) -> Call:
    """Read a call of the plain form, or as OpenAI writes it."""
    call = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(call, dict):
        return _UNREADABLE
    name, arguments = call.get("name"), call.get("arguments", {})
    try:
        if isinstance(arguments, str):
            # OpenAI has them as JSON in a text.
            arguments = json.loads(arguments)
        # JSON can write half of a surrogate pair, which has no bytes, and which no tokenizer takes.
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _UNREADABLE
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else _UNREADABLE


def do_call(call: Call, tools: Mapping[str, Tool], schemas: Mapping[str, Schema]) -> str:
    """Do a call, and give its result, or what is wrong with it, as a text for the model.

    Whatever else than a ToolError the tool raises is raised.
    """
    try:
        _check(call, tools, schemas)
        result = tools[call.name](**call.arguments)
    except ToolError as error:
        return f"error: {error}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _check(call: Call, tools: Mapping[str, Tool], schemas: Mapping[str, Schema]) -> None:
    if not call.name:
        raise ToolError('a call is {"name": NAME, "arguments": {...}}')
    if call.name not in tools:
        raise ToolError(f"there is no such tool; there are: {', '.join(tools)}")
    try:
        inspect.signature(tools[call.name]).bind(**call.arguments)
    except TypeError as error:
        raise ToolError(str(error)) from error
    properties = schemas[call.name]["function"]["parameters"]["properties"]
    for name, value in call.arguments.items():
        wanted = properties.get(name, {}).get("type")
        kinds = _TYPES.get(wanted, ()) if isinstance(wanted, str) else ()
        # A truth value is an int to Python.
        is_other = isinstance(value, bool) and wanted != "boolean"
        is_nullable = value is None and properties.get(name, {}).get("nullable", False)
        if kinds and not is_nullable and (is_other or not isinstance(value, kinds)):
            raise ToolError(f"the argument {name} must be of type {wanted}")
