"""Messages of ranks, the broker and generators: JSON, whatever carries them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from hfdist.messages.message import Message, read_message

RANK = "rank-"
"""Prefix of the names of ranks."""
DROPPED = b""
"""What the broker sends to one that it does not hear any more. No message is empty."""
MOST_BYTES = 2**28
"""The most bytes of one message: of the prompts of a step, or of their answers."""


class Link(Protocol):
    """A connection to the broker, on this machine or on another one."""

    def send(self, content: bytes, /) -> object:
        """Begin to send a message."""

    def recv(self) -> bytes:
        """Wait for a message."""

    def close(self) -> None:
        """End the connection."""


def pack(message: Mapping[str, object]) -> bytes:
    """Make bytes of a message, without line ends."""
    return json.dumps(message).encode()


def unpack(content: bytes) -> Message:
    """Read a message; NotAMessageError: the bytes are no message."""
    return read_message(content, MOST_BYTES)
