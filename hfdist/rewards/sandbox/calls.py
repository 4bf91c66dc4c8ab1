"""Calls of a program's functions by a process that must not trust it: names and plain data cross, and nothing else.

A message is a line of JSON. Numbers, texts, bytes, lists, tuples, sets and dicts arrive as copies of the exact builtin
types, so that no `__eq__` of the program comes along. Of an object that extends one of them, such as a Counter, the
data arrives. Nothing is ever asked of the tests.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

LOAD = "<program>"
"""Name of the call that runs the program's source; no function can have it."""
_LONGEST = 2**20
"""Bytes of a message."""
_ENDS = (StopIteration, StopAsyncIteration)
"""Exceptions that would end an iteration in the tests: `all(map(f, values))` would be true where it has ended."""
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)


class LostError(BaseException):
    """The program's process has ended, or has sent what is no message.

    No Exception: else a program that ends would pass a test that expects it to raise.
    """


class NoPlainDataError(BaseException):
    """A value cannot cross. No Exception: a test must not catch it."""


class Program:
    """The process of the program, as the tests see it.

    Args:
        read: the pipe of its messages.
        write: the pipe of messages to it.
    """

    def __init__(self, read: BinaryIO, write: BinaryIO) -> None:
        self._read, self._write = read, write
        self._is_lost = False

    def call(self, function: str, /, *arguments: object, **named: object) -> Any:
        """Call a function of the program; raises what the function raises, as the nearest builtin exception."""
        line = _line({"call": function, "arguments": _encode(arguments), "named": _encode(named)})
        if self._is_lost:
            raise LostError("it is lost already")
        # It counts as lost until a valid answer has come.
        self._is_lost = True
        try:
            self._write.write(line)
            self._write.flush()
            line = self._read.readline(_LONGEST + 1)
            message = json.loads(line)
            value, error = _decode(message.get("value")), message.get("error")
        except (OSError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as cause:
            raise LostError("it has sent no message, or no value") from cause
        if not line.endswith(b"\n"):
            raise LostError("it has ended within a message, or sent a longer one")
        self._is_lost = False
        if error is not None:
            raise _nearest(error, str(message.get("text")))
        return value


def serve(read: BinaryIO, write: BinaryIO, functions: Mapping[str, Callable[..., object]]) -> None:
    """Be the process of the program: call the functions that the tests name, until they end."""
    while line := read.readline():
        message = json.loads(line)
        try:
            if message["call"] not in functions:
                raise NameError(message["call"])
            given = functions[message["call"]](*_decode(message["arguments"]), **_decode(message["named"]))
            reply = {"value": _encode(given)}
        except BaseException as error:  # whatever the program raises
            reply = {"error": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}
        write.write(_line(reply))
        write.flush()


def _text(error: BaseException) -> str:
    """Give what the nearest builtin exception takes to have the text of this one."""
    # That of a KeyError is its key in quotes, which the KeyError of the tests would put in quotes again.
    is_quoted = type(error).__str__ is KeyError.__str__ and [*map(type, error.args)] == [str]
    return error.args[0] if is_quoted else str(error)


def _line(message: Mapping[str, object]) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    if len(line) > _LONGEST:
        raise LostError("the message is too long")
    return line


def _encode(value: Any) -> object:
    kind = next((base for base in _PLAIN if isinstance(value, base)), None)
    if value is None or kind is bool:
        return value
    if kind is None:
        raise NoPlainDataError(type(value).__name__)
    value = kind(value)
    if kind is float or kind is str:
        return value
    if kind is int:  # decimal digits would take quadratic time
        return {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    return {kind.__name__: [_encode(item) for item in value]}


def _decode(value: Any) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "list" | "tuple" | "set" | "frozenset":
            return getattr(builtins, kind)([_decode(item) for item in content])
        case "dict":
            return {_decode(key): _decode(item) for key, item in content}
    raise ValueError(kind)


def _nearest(names: object, text: str) -> BaseException:
    if type(names) is list and "Exception" not in names:
        # It ends, as by `sys.exit()`, or has given what cannot cross: no test that expects an exception may pass.
        return LostError(text)
    kinds = [getattr(builtins, str(name), None) for name in names] if type(names) is list else []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS):
            try:
                return kind(text)
            except TypeError:  # it takes more than a text
                continue
    return RuntimeError(text)
