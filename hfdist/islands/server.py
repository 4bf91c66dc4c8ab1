"""Who takes part: a server to which all ranks of all islands are connected. It sees no weights, and loads no torch.

Islands come to a meeting at the end of each round. Once all that are there have come, those whose outer weights are the
same exchange what they have learned, and the others get the state of one of these. What was exchanged counts once all
have it: an island that is lost before makes the meeting void, and the rest meet again. Lost is who ends its connection
or does not beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECRET = "HFDIST_ISLANDS_SECRET"
"""The variable with what all islands and their server know, where strangers can reach it."""
BEAT_SECONDS = 1.0
_MOST_BYTES = 2**22
"""Of a message: the addresses of an island's ranks."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where an island stands when it comes to a meeting."""

    step: int
    outer_step: int
    """Of the last round that counts."""
    digest: str
    """Of the outer weights behind it."""

    @property
    def outer(self) -> tuple[int, str]:
        """Equal for islands that may go on together."""
        return self.outer_step, self.digest

    @property
    def is_start(self) -> bool:
        """Whether it has learned nothing since."""
        return self.step == self.outer_step


@dataclass
class _Island:
    """A launch that is connected."""

    index: int
    start: str
    """Chosen anew at each start of the launch."""
    job: dict[str, Any] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    """Of its ranks, for other islands."""
    connections: dict[int, _Connection] = field(default_factory=dict)
    """By rank."""
    arrival: Arrival | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.addresses) and len(self.connections) == len(self.addresses)


@dataclass(eq=False)
class _Connection:
    """Of one rank."""

    writer: asyncio.StreamWriter
    heard_seconds: float

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass
class _Meeting:
    """An exchange that is under way."""

    number: int
    members: list[int]
    donors: dict[int, int]
    """Of islands that get the state of a member, by their index."""
    missing: set[int]
    """Members that do not have all yet; once it is empty the exchange counts."""


class _RefusedError(Exception):
    """A connection that cannot be used, with what its island is told."""

    def __init__(self, **answer: Any) -> None:
        super().__init__(answer)
        self.answer = answer


class IslandServer:
    """Serves the islands of one job.

    Args:
        listener: a listening socket.
        secret: that all islands know; empty: none.
        least: islands with which the first meeting begins; None: as many as they say.
        silent_seconds: after which a rank is lost.
        say: takes a line for people.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: str = "",
        least: int | None = None,
        silent_seconds: float = 10.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._listener, self._secret, self._least = listener, secret, least
        self._silent_seconds, self._say = silent_seconds, say
        self._islands: dict[int, _Island] = {}
        self._meeting: _Meeting | None = None
        self._number = 0
        self._has_begun = False
        self._nonce = random_text()
        """Known to who is connected here: marks what islands send each other."""

    async def serve(self) -> None:
        """Serve until it is cancelled."""
        server = await asyncio.start_server(self._hear, sock=self._listener, limit=_MOST_BYTES)
        async with server:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        for island in list(self._islands.values()):
            for rank, connection in list(island.connections.items()):
                silent = now - connection.heard_seconds
                if silent > self._silent_seconds:
                    self._lose(island, f"rank {rank} is silent for {silent:.0f} s")
                    break
                connection.send({"beat": 1})

    # ---- one connection ----

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        island: _Island | None = None
        connection = _Connection(writer, time.monotonic())
        # What no rank would send ends a connection, too.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, asyncio.CancelledError):
            try:
                hello = json.loads(await reader.readline())
                island, rank = self._admit(hello, connection)
                while (line := await reader.readline()).endswith(b"\n"):
                    connection.heard_seconds = time.monotonic()
                    if self._islands.get(island.index) is not island:
                        break
                    self._take(island, rank, json.loads(line))
            except _RefusedError as error:
                connection.send(error.answer)
                await writer.drain()
        if island is not None and connection in island.connections.values():
            self._lose(island, "a connection has ended")
        writer.close()

    def _admit(self, hello: dict[str, Any], connection: _Connection) -> tuple[_Island, int]:
        if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
            raise _RefusedError(refused="the server knows another secret", key=SECRET)
        index, rank, start = int(hello["island"]), int(hello["rank"]), str(hello["start"])
        island = self._islands.get(index)
        if island is not None and island.start != start:
            # Perhaps for a moment: of an island that was cut off and has started anew.
            what = "an island with this index is there already"
            raise _RefusedError(refused=what, key="islands.index", found=index, may_pass=True)
        if island is not None and rank in island.connections:
            # It has lost the other end, and this server has not noticed yet.
            self._lose(island, "it has connected anew")
            island = None
        if rank == 0:
            self._check_job(index, hello["job"])
        if island is None:
            island = self._islands[index] = _Island(index, start)
        if rank == 0:
            island.job, island.addresses = hello["job"], [str(one) for one in hello["addresses"]]
        island.connections[rank] = connection
        connection.send({"welcome": self._nonce})
        if island.is_complete:
            self._say(f"island {index} is there, with {len(island.addresses)} ranks")
        return island, rank

    def _check_job(self, index: int, job: dict[str, Any]) -> None:
        for other in self._islands.values():
            for key, value in other.job.items():
                if other.index != index and job.get(key) != value:
                    what = f"island {other.index} has another value, and all must have the same"
                    raise _RefusedError(refused=what, key=key, found=job.get(key), allowed=value)

    def _take(self, island: _Island, rank: int, message: dict[str, Any]) -> None:
        if "at" in message:
            step, outer_step, digest = message["at"]
            island.arrival = Arrival(step=int(step), outer_step=int(outer_step), digest=str(digest))
            self._meet()
        elif "done" in message:
            self._note(island, int(message["done"]), bool(message["ok"]))
        elif "bye" in message:
            self._lose(island, "it has ended")

    def _lose(self, island: _Island, why: str) -> None:
        if self._islands.get(island.index) is not island:
            return
        del self._islands[island.index]
        for connection in island.connections.values():
            connection.writer.close()
        self._say(f"island {island.index} has left: {why}")
        meeting = self._meeting
        if meeting is not None:
            if island.index in meeting.members and meeting.missing:
                self._void(meeting)
            else:
                for joiner in [one for one, donor in meeting.donors.items() if island.index in (one, donor)]:
                    del meeting.donors[joiner]
                    self._tell([joiner], {"void": meeting.number})
                self._end(meeting)
        if not self._islands:
            self._has_begun = False
        self._meet()

    # ---- meetings ----

    def _meet(self) -> None:
        """Begin a meeting if all islands have come."""
        there = [island for island in self._islands.values() if island.is_complete]
        arrivals = {island.index: island.arrival for island in there if island.arrival is not None}
        if self._meeting is not None or not arrivals or len(arrivals) < len(there):
            return
        least = max(int(island.job["islands.count"]) for island in there) if self._least is None else self._least
        if not self._has_begun and len(there) < least:
            self._say(f"{len(there)} of {least} islands are there")
            return
        self._has_begun = True
        outers = [arrival.outer for arrival in arrivals.values()]
        # The newest, and of several those of most islands.
        newest = max(outers, key=lambda outer: (outer[0], outers.count(outer), outer[1]))
        alike = {index: arrival for index, arrival in arrivals.items() if arrival.outer == newest}
        starting = [index for index, arrival in alike.items() if arrival.is_start]
        if starting:
            # They have nothing to exchange yet. All others wait for them.
            self._number += 1
            self._tell(starting, {"round": self._number, "members": {}, "donors": {}})
            return
        last = max(arrival.step for arrival in alike.values())
        members = sorted(index for index, arrival in alike.items() if arrival.step == last)
        others = sorted(index for index in arrivals if index not in members)
        donors = {joiner: members[place % len(members)] for place, joiner in enumerate(others)}
        self._number += 1
        self._meeting = _Meeting(self._number, members, donors, set(members))
        addresses = {index: self._islands[index].addresses for index in (*members, *others)}
        message = {"round": self._number, "members": {index: addresses[index] for index in members}}
        self._tell([*members, *others], message | {"donors": {j: [d, addresses[j]] for j, d in donors.items()}})
        text = f"step {last}: islands {', '.join(map(str, members))} exchange"
        self._say(text + (f"; {', '.join(map(str, others))} will get their state" if others else ""))

    def _note(self, island: _Island, number: int, is_ok: bool) -> None:
        meeting = self._meeting
        if meeting is None or meeting.number != number:
            return
        if island.index in meeting.missing:
            if not is_ok:
                self._void(meeting)
                self._meet()
                return
            meeting.missing.discard(island.index)
            if not meeting.missing:
                self._tell(meeting.members, {"commit": number})
        elif island.index in meeting.donors:
            del meeting.donors[island.index]
            self._say(f"island {island.index} takes part")
        self._end(meeting)

    def _end(self, meeting: _Meeting) -> None:
        if not meeting.missing and not meeting.donors:
            self._meeting = None
            self._meet()

    def _void(self, meeting: _Meeting) -> None:
        self._meeting = None
        self._say("the exchange is void: those who are left meet again")
        self._tell([*meeting.members, *meeting.donors], {"void": meeting.number})

    def _tell(self, indices: list[int], message: dict[str, Any]) -> None:
        """Tell all ranks of some islands. Who is told of a meeting or its end has to come again for the next one."""
        for index in indices:
            if (island := self._islands.get(index)) is not None:
                if "commit" not in message:
                    island.arrival = None
                for connection in island.connections.values():
                    connection.send(message)


def random_text() -> str:
    """Give a random text that nobody can guess."""
    return secrets.token_hex(16)
