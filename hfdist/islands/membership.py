"""Islands that are connected to the server, and what it tells their ranks."""

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


@dataclass(eq=False)
class Connection:
    """The connection of one rank to the server."""

    writer: asyncio.StreamWriter
    heard_seconds: float

    def hear(self) -> None:
        """Note that it is not silent."""
        self.heard_seconds = time.monotonic()

    def beat(self) -> None:
        """Say that this end lives; what is under way says so by itself, and may be all that `send` lets wait."""
        if self.writer.transport.get_write_buffer_size() == 0:
            self.send({"beat": 1})

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Begin to send; it goes on beside what follows. Who does not take what was sent before is dropped."""
        if self.writer.transport.get_write_buffer_size() > MOST_BYTES + 2 * len(payload):
            self.writer.transport.abort()
            return
        self.writer.write(write_message(message, len(payload)))
        if payload:
            self.writer.write(payload)


@dataclass(eq=False)
class Island:
    """An island: a launch that is connected."""

    index: int
    start: str
    """Text that is chosen anew at each start of the launch."""
    job: Message = field(default_factory=Message)
    ticket: str = field(default_factory=lambda: secrets.token_hex(16))
    """What its connections to the shards of a parameter server show; another each time that it is there."""
    addresses: list[str] = field(default_factory=list)
    """Addresses of the island's ranks, for other islands."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """Connections of the island's ranks, by rank."""
    since: float = field(default_factory=time.monotonic)
    """Time on the clock at which its first rank has come."""
    _introduced: WeakSet[Island] = field(default_factory=WeakSet)
    """Islands whose addresses this one has been told."""

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are connected."""
        return bool(self.addresses) and self.connections.keys() == set(range(len(self.addresses)))

    def tell(self, message: Mapping[str, object]) -> None:
        """Tell all of its ranks."""
        for connection in self.connections.values():
            connection.send(message)

    def tell_first(self, message: Mapping[str, object]) -> None:
        """Tell rank 0, which speaks for the island and tells the others."""
        if 0 in self.connections:
            self.connections[0].send(message)

    def introduce(self, islands: Iterable[Island]) -> None:
        """Tell the addresses of islands, each once: they grow with the ranks of all, and a rendezvous names indices."""
        new = [island for island in islands if island not in self._introduced]
        if new:
            self.tell_first({"addresses": {island.index: island.addresses for island in new}})
            self._introduced.update(new)


@dataclass(frozen=True, kw_only=True)
class JobIslands:
    """The islands of a job, as the server shows them to the coordinator of the job."""

    connected: Mapping[int, Island]
    """Those that are connected, by index; it is live."""
    least: int | None
    """How many must be there before the training begins; None: as many as the job says."""
    end: Callable[[Island, str], None]
    """Ends an island that cannot take part, and tells it why."""
    say: Callable[[str], None]
    """Takes a line for people."""


class Coordinator(Protocol):
    """What a server does with the messages of islands. NotAMessageError: no rank would send it."""

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give how many bytes may follow a message."""

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Take what a rank has sent."""

    def tick(self) -> None:
        """Look at the clock, once in a while."""

    def lose(self, index: int) -> None:
        """Go on without an island."""
