"""Islands that are connected to the server, and the messages between it and their ranks.

A message is a line of JSON. If it has the key `bytes`, so many bytes follow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

SECRET = "HFDIST_ISLANDS_SECRET"
"""The variable with what all islands and their server know, where strangers can reach it."""
BEAT_SECONDS = 1.0
MOST_BYTES = 2**22
"""Of a line: the addresses of an island's ranks, or what these exchange."""


def encode_message(message: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """Give the line of a message; `payload` is to follow it."""
    counted = dict(message) | ({"bytes": len(payload)} if payload else {})
    return json.dumps(counted).encode() + b"\n"


@dataclass(eq=False)
class Connection:
    """Of one rank."""

    writer: asyncio.StreamWriter
    heard_seconds: float

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Begin to send; it goes on beside what follows."""
        self.writer.write(encode_message(message, payload))
        if payload:
            self.writer.write(payload)


@dataclass
class Island:
    """A launch that is connected."""

    index: int
    start: str
    """Chosen anew at each start of the launch."""
    job: dict[str, Any] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    """Of its ranks, for other islands."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """By rank."""

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are connected."""
        return bool(self.addresses) and len(self.connections) == len(self.addresses)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Tell all of its ranks."""
        for connection in self.connections.values():
            connection.send(message)


class Coordinator(Protocol):
    """What a server does with the messages of islands."""

    def take(self, island: Island, rank: int, message: dict[str, Any], payload: bytes) -> None:
        """Take what a rank has sent. ValueError, KeyError, TypeError: no rank would send it."""

    def lose(self, index: int) -> None:
        """Go on without an island."""
