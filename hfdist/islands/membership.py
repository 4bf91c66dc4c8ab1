"""The islands that are connected to a server, the connections of their ranks, and the coordinator that they obey."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from hfdist.messages.message import MOST_BYTES, Message, write_message

BEAT_SECONDS = 1.0
"""Seconds between two beats, by which each end of a connection knows that the other one lives."""


@dataclass(eq=False)
class Connection:
    """The server's end of the connection of one rank."""

    writer: asyncio.StreamWriter
    heard_seconds: float
    """Time on the monotonic clock at which something has come last."""

    def hear(self) -> None:
        """Note that something has come from the rank just now."""
        self.heard_seconds = time.monotonic()

    def beat(self) -> None:
        """Send a beat, if nothing else is on its way: what is on its way shows the rank that this end lives."""
        if self.writer.transport.get_write_buffer_size() == 0:
            self.send({"beat": 1})

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Begin to send a message and the bytes that follow it, and do not wait for the end.

        The connection of a rank that does not read what was sent before is aborted.
        """
        # One answer with weights may still be on its way, and a few messages.
        if self.writer.transport.get_write_buffer_size() > MOST_BYTES + 2 * len(payload):
            self.writer.transport.abort()
            return
        self.writer.write(write_message(message, len(payload)))
        if payload:
            self.writer.write(payload)


@dataclass(eq=False)
class Island:
    """An island of which at least one rank is connected to the server."""

    index: int
    """The island's `islands.index`."""
    start: str
    """Text that is chosen anew at each start of the launch."""
    job: Message = field(default_factory=Message)
    """Values that all islands must have alike, by key; empty until rank 0 has come, which brings them."""
    ticket: str = field(default_factory=lambda: secrets.token_hex(16))
    """Secret by which shards of a parameter server know the island's ranks; a new one each time the island connects."""
    addresses: list[str] = field(default_factory=list)
    """Addresses of the island's ranks, for other islands; empty until rank 0 has come, which brings them."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """Connections of the island's ranks, by rank."""
    since: float = field(default_factory=time.monotonic)
    """Time on the monotonic clock at which the island's first rank has come."""
    _introduced: WeakSet[Island] = field(default_factory=WeakSet)
    """Islands whose addresses this one has been told."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the island are connected."""
        return bool(self.addresses) and self.connections.keys() == set(range(len(self.addresses)))

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message to all ranks of the island."""
        for connection in self.connections.values():
            connection.send(message)

    def tell_first(self, message: Mapping[str, object]) -> None:
        """Send a message to rank 0, which speaks for the island and tells its other ranks."""
        if 0 in self.connections:
            self.connections[0].send(message)

    def introduce(self, islands: Iterable[Island]) -> None:
        """Send rank 0 the addresses of other islands, those of each island once.

        Later messages name islands by their index alone: the addresses of all ranks are long.
        """
        new = [island for island in islands if island not in self._introduced]
        if new:
            self.tell_first({"addresses": {island.index: island.addresses for island in new}})
            self._introduced.update(new)


@dataclass(frozen=True, kw_only=True)
class JobIslands:
    """The islands of a job, as the server shows them to the job's coordinator."""

    connected: Mapping[int, Island]
    """The connected islands, by index; the server changes this mapping as islands come and go."""
    least: int | None
    """Number of islands with which the training begins; None: the number that the job says."""
    end: Callable[[Island, str], None]
    """Ends an island that cannot take part, and tells it why."""
    say: Callable[[str], None]
    """Takes a line for people."""


class Coordinator(Protocol):
    """What a server does with the messages of a job's islands: `Rendezvous`, or `ParameterServer`."""

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give the most bytes that may follow a message of a rank; NotAMessageError: no rank would send it."""

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Act on a message of a rank and the bytes that follow it; NotAMessageError: no rank would send them."""

    def tick(self) -> None:
        """Act on the time that has passed. The server calls it about once a second."""

    def lose(self, index: int) -> None:
        """Go on without the island of this index, which has left."""
