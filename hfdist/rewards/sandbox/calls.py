"""Calls between two processes of which one must not trust the other: plain data crosses, all else stays where it is.

A message is a line of JSON. Numbers, texts, bytes, lists, tuples, sets and dicts arrive as copies of the exact builtin
types, so that no `__eq__` of the sender comes along. Any other object is a `Remote` for the receiver. Its operations
are asked of the sender, except comparisons and arithmetic with plain data: they would tell the sender what is expected.
They take the data that the object is made of, such as the tuple of a namedtuple.
"""

from __future__ import annotations

import builtins
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

_LONGEST = 2**20
"""Bytes of a message."""
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
_OPERATIONS = ("abs", "neg", "iter", "len", "next", "repr", "str", "getitem", "setitem", "delitem")
_OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class LostError(BaseException):
    """The other process has ended, or has sent what is no message.

    No Exception: else a program that ends would pass a test that expects it to raise.
    """


class Peer:
    """The other process: asks it, and answers what it asks.

    Args:
        read: where its messages come from.
        write: where messages to it go.
        served: what it may ask for, by name.
    """

    def __init__(self, read: BinaryIO, write: BinaryIO, served: Mapping[str, Callable[..., Any]]) -> None:
        self._read, self._write, self._served = read, write, served
        self._kept: list[Any] = []
        self._is_lost = False

    def ask(self, name: str, *arguments: object) -> Any:
        """Give what the other process gives; raises what it raises, as the nearest builtin exception."""
        self._send({"ask": name, "arguments": self._encode(arguments)})
        while "ask" in (message := self._receive()):
            self._answer(message)
        if "error" in message:
            raise _nearest(message["error"], str(message.get("text")))
        return self._arrived(message.get("value"))

    def listen(self) -> None:
        """Answer until the other process is lost."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: Any) -> None:
        try:
            arguments = self._arrived(message.get("arguments"))
            reply = {"value": self._encode(self._served[message["ask"]](*arguments))}
        except LostError:
            raise
        except BaseException as error:  # whatever code of others raises
            reply = {"error": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
        self._send(reply)

    def _send(self, message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        if self._is_lost or len(line) > _LONGEST:
            raise LostError("the message is too long, or the other process is lost")
        try:
            self._write.write(line)
            self._write.flush()
        except OSError as error:
            self._is_lost = True
            raise LostError(str(error)) from error

    def _receive(self) -> Any:
        line = self._read.readline(_LONGEST + 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not line.endswith(b"\n") or type(message) is not dict:
            self._is_lost = True
            raise LostError("the other process has sent no message")
        return message

    def _arrived(self, value: object) -> Any:
        try:
            return self._decode(value)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
            self._is_lost = True
            raise LostError("the other process has sent no value") from error

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:  # decimal digits would take quadratic time
            return {"int": hex(value)}
        if kind is float:
            return {"float": value.hex()}
        if kind is complex:
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self._encode(item) for item in value]}
        if kind is dict:
            return {"dict": [[self._encode(key), self._encode(item)] for key, item in value.items()]}
        if kind is Remote:
            return {"yours": value._number}
        self._kept.append(value)
        return {"mine": len(self._kept) - 1}

    def _decode(self, value: Any) -> object:
        if value is None or type(value) in (bool, str):
            return value
        [(kind, content)] = value.items()
        match kind:
            case "int":
                return int(content, 16)
            case "float":
                return float.fromhex(content)
            case "complex":
                return complex(*map(float.fromhex, content))
            case "bytes":
                return bytes.fromhex(content)
            case "list" | "tuple" | "set" | "frozenset":
                return getattr(builtins, kind)([self._decode(item) for item in content])
            case "dict":
                return {self._decode(key): self._decode(item) for key, item in content}
            case "mine":
                return Remote(self, int(content))
            case "yours":
                return self._kept[content]
        raise ValueError(kind)


def plain_data(value: Any) -> tuple[bool, Any]:
    """Give whether an object is of a subclass of a builtin type, and its data as that type."""
    base = next((base for base in _PLAIN if isinstance(value, base)), None)
    return (False, None) if base is None else (True, base(value))


def call(function: Any, arguments: tuple[object, ...], named: Mapping[str, object]) -> Any:
    """Call a function."""
    return function(*arguments, **named)


def operations() -> dict[str, Callable[..., Any]]:
    """What `Remote` asks for."""
    names = {name: getattr(operator, name, None) or getattr(builtins, name) for name in (*_OPERATIONS, *_OF_TWO)}
    others = {"call": call, "plain": plain_data, "truth": bool, "isinstance": isinstance}
    return {**names, **others, "getattr": getattr, "setattr": setattr}


def _nearest(names: object, text: str) -> Exception:
    kinds = [getattr(builtins, str(name), None) for name in names] if type(names) is list else []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # it takes more than a text
                continue
    return RuntimeError(text)


class Remote:
    """An object of the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        return self._peer.ask("call", self, arguments, named)

    def __bool__(self) -> bool:
        return bool(self._peer.ask("truth", self) is True)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.ask("isinstance", value, self) is True

    def __contains__(self, item: object) -> bool:
        # A `__contains__` of the other process could say yes to everything.
        return any(one is item or one == item for one in iter(self))

    def __hash__(self) -> int:
        return hash(self._number)


def _operation(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._peer.ask(name, self, *arguments)


def _operation_of_two(name: str) -> Callable[[Remote, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Remote, other: object) -> Any:
        if type(other) is Remote:
            return self._peer.ask(name, self, other)
        is_plain, value = self._peer.ask("plain", self)
        return compute(value, other) if is_plain is True else NotImplemented

    return method


for _name in _OPERATIONS:
    setattr(Remote, f"__{_name}__", _operation(_name))
for _name in _OF_TWO:
    setattr(Remote, f"__{_name}__", _operation_of_two(_name))
