"""The exchange of heartbeats: a rank serves those below it on a free port, apart from the stores of torch and launcher.

By Python's own sockets and not by torch's TCPStore, because each wait must be one that can be ended: a thread that
comes back from torch's C++ while the interpreter ends aborts the process ("terminate called without an active
exception", Python 3.11 to 3.13), and none of TCPStore's calls is bound to come back before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hfdist.collectives import first_problem, gather_json, rank, world_size
from hfdist.control_group import machines
from hfdist.launch.address import LOOPBACK, listen, own_address
from hfdist.messages.door import MOST_STRANGERS, Door, DoorThread, hear_answer, knock, read_line
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message, write_message
from hfdist.topology import read_launcher
from hfdist.watch.diagnosis import Diagnosis
from hfdist.watch.heartbeat import Heartbeat, PeerState, Read, as_tuple
from hfdist.watch.tree import Below, Digest, find_above, find_parents

_CONNECT_SECONDS = 30
_MOST_BYTES = 2**16
"""The most bytes of a line, which is one message, but for what it says of each rank below the speaker."""
_MOST_BYTES_OF_EACH = 2**10
_PATIENCE_BEATS, _LEAST_PATIENCE_SECONDS = 2, 1.0
"""Time after which those below a rank that does not answer turn to the next one above: in beats, and at least."""
_RETURN_SECONDS = 60.0
"""Seconds after which they try it again: it may have been busy, and rank 0 cannot hear thousands."""


class Answer(NamedTuple):
    """What comes down the tree: what rank 0 says."""

    beat: Heartbeat
    verdict: Diagnosis | None = None
    asks_each: bool = False
    """Whether rank 0 wants to hear of each rank."""


class Told(NamedTuple):
    """What goes up the tree: what a rank says to the one above it."""

    beat: Heartbeat
    digest: Digest
    each: dict[int, PeerState]
    """What it knows of each rank below it; empty: rank 0 has not asked, and all is well."""


def open_store(beat_seconds: float) -> Store:
    """Connect all ranks, each with the one above it in the tree. A collective.

    Args:
        beat_seconds: seconds between two heartbeats.

    Raises:
        OSError: some rank cannot reach the one above it. On all ranks alike.
    """
    own, size = rank(), world_size()
    # A rank that is lost before its first beat must have a host and a pid, too.
    known = [Heartbeat(number=0, host=host, pid=pid) for host, pid in gather_json([platform.node(), os.getpid()])]
    is_here = len(machines()) == 1 and not read_launcher().has_other_machines
    parents = find_parents(machines())
    hosted: HostedStore | None = None
    joined: JoinedStore | None = None
    problem, told = None, None
    token = gather_json(secrets.token_hex(16) if own == 0 else None)[0]
    below = Below(own, known, parents, time.monotonic())
    if len(below) or own == 0:
        try:
            address, listens_at = (LOOPBACK, LOOPBACK) if is_here else own_address(own)
            hosted = HostedStore(below, size, token, listens_at)
            told = [address, hosted.port]
        except OSError as error:
            problem = f"rank {own} cannot serve the others ({error})"
    addresses = gather_json(told)
    above = find_above(own, parents)
    if above and all(addresses[one] is not None for one in above):
        try:
            joined = JoinedStore([tuple(addresses[one]) for one in above], token, own, beat_seconds)
        except OSError as error:
            problem = f"rank {own} cannot reach rank {above[0]} at {addresses[above[0]]} ({error})"
    store = Store(own, size, below, hosted, joined)
    problem = first_problem(problem)
    if problem is not None:
        store.close()
        raise OSError(problem)
    return store


class Store:
    """A rank's place in the tree: what is below it, and what is above.

    Args:
        rank: this one.
        world_size: number of ranks.
        below: what this rank hears of those below it.
        hosted: where they say it; None: there are none.
        joined: the connection to the rank above; None: this is rank 0.
    """

    def __init__(
        self, rank: int, world_size: int, below: Below, hosted: HostedStore | None, joined: JoinedStore | None
    ) -> None:
        self.rank, self.world_size, self.below = rank, world_size, below
        self._hosted, self._joined = hosted, joined
        self._asks_each = False

    def exchange(
        self, own: Heartbeat, verdict: Diagnosis | None, beat_seconds: float, *, asks_each: bool = False
    ) -> tuple[Heartbeat, Diagnosis | None]:
        """Send a heartbeat with what is below, and wait for that of rank 0 and its verdict.

        It may not return before `close`, as those above may be stopped: the thread that judges must not call it. On
        rank 0 it never waits.

        Args:
            own: this rank's.
            verdict: on rank 0, its verdict.
            beat_seconds: seconds between two beats.
            asks_each: on rank 0, whether it wants to hear of each rank.

        Raises:
            OSError: the connection has ended, and there is nobody else above.
        """
        answer = Answer(own, verdict, asks_each)
        if self._joined is not None:
            now = time.monotonic()
            digest = self.below.digest(now, beat_seconds)
            is_each = digest.is_noted or self._asks_each
            try:
                answer = self._joined.tell(own, digest, self.below.states(now, beat_seconds) if is_each else {})
            except OSError:
                if self._hosted is not None and verdict is None and own.left is None:
                    # Those below are well: they turn to the next one above. At the end they may still ask this one.
                    self._hosted.close()
                raise
            self._asks_each = answer.asks_each
        if self._hosted is not None:
            self._hosted.publish(answer)
        return answer.beat, answer.verdict or verdict

    def close(self) -> None:
        """Serve no more, and end the connection, with whatever waits for it."""
        if self._joined is not None:
            self._joined.close()
        if self._hosted is not None:
            self._hosted.close()


class HostedStore:
    """What a rank serves to those below it, by a thread of its own, which answers every beat with what rank 0 says.

    Args:
        below: what is told all that comes.
        world_size: number of ranks.
        token: known to the ranks of this run.
        host: address at which this process listens.
    """

    def __init__(self, below: Below, world_size: int, token: str, host: str = LOOPBACK) -> None:
        self.world_size, self.token = world_size, token
        self._below = below
        self._most_bytes = _MOST_BYTES + _MOST_BYTES_OF_EACH * world_size
        self.publish(Answer(below.of_rank_0))
        # All ranks come at once, and count as strangers first.
        door = Door(self.token, self._hear, most_strangers=MOST_STRANGERS + 2 * world_size)
        self._served = DoorThread(door, listen(host, 0), "watch-store")
        self.port = self._served.port

    def publish(self, answer: Answer) -> None:
        """Set what the ranks below are answered."""
        self._answer = write_message(answer._asdict())

    def close(self) -> None:
        """Serve no more."""
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank's beats, until it ends the connection or sends what no rank would."""
        speaker = hello.integer("rank", least=1, most=self.world_size - 1)
        if speaker not in self._below:
            raise NotAMessageError(f"rank {speaker} is not below this one")
        while True:
            told = read_told(await read_line(reader, self._most_bytes), self._most_bytes)
            self._below.hear(speaker, *told, time.monotonic())
            writer.write(self._answer)
            await writer.drain()


class JoinedStore:
    """The connection of a rank to the one above it, or to the next one above while that does not answer.

    Args:
        above: addresses of the ranks above, the nearest first.
        token: known to the ranks of this run.
        rank: this one.
        beat_seconds: seconds between two heartbeats.

    Raises:
        OSError: the nearest cannot be reached.
    """

    def __init__(self, above: Sequence[tuple[str, int]], token: str, rank: int, beat_seconds: float) -> None:
        self._above, self._token, self._rank = above, token, rank
        self._patience_seconds = max(_PATIENCE_BEATS * beat_seconds, _LEAST_PATIENCE_SECONDS)
        self._returns_at = 0.0
        """Time of the clock at which the nearest rank is tried again, where it was left."""
        self._is_closed = False
        self._connect(0, _CONNECT_SECONDS)

    def tell(self, own: Heartbeat, digest: Digest, each: Mapping[int, PeerState]) -> Answer:
        """Send a heartbeat, what this rank says of those below it, and wait for the answer.

        Raises:
            OSError: the connection has ended, and there is nobody else above.
        """
        told = [[number, *state] for number, state in each.items()]
        message = write_message({"beat": own, "digest": digest, "each": told})
        if self._place and time.monotonic() > self._returns_at:
            self._returns_at = time.monotonic() + _RETURN_SECONDS
            with contextlib.suppress(OSError):
                self._connect(0, self._patience_seconds)
        while True:
            try:
                self._connection.sendall(message)
                answer = hear_answer(self._answers)
                beat = _read_tuple(Heartbeat, answer, "beat")
                verdict = None if answer.get("verdict") is None else _read_tuple(Diagnosis, answer, "verdict")
                return Answer(beat, verdict, answer.flag("asks_each"))
            except (NotAMessageError, RefusedError) as error:
                raise ConnectionResetError(f"the rank above has sent what it should not: {error}") from error
            except OSError as error:
                self._go_further(error)

    def close(self) -> None:
        """End the connection, and with it whatever waits for it."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # ended before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _go_further(self, error: OSError) -> None:
        """Connect with the nearest rank above the one that is lost; raise `error` if there is none."""
        self._connection.close()
        self._returns_at = time.monotonic() + _RETURN_SECONDS
        for place in range(self._place + 1, len(self._above)):
            with contextlib.suppress(OSError):
                return self._connect(place, self._patience_seconds)
        raise error

    def _connect(self, place: int, timeout_seconds: float) -> None:
        address = self._above[place]
        try:
            made = knock(address, self._token, {"rank": self._rank}, {}, timeout_seconds)
        except (NotAMessageError, RefusedError) as error:
            raise ConnectionRefusedError(f"that is no rank of this run: {error}") from error
        self._place, (self._connection, self._answers) = place, made
        if self._is_closed:
            # While this one was being made.
            self.close()
            raise ConnectionAbortedError("this rank leaves")
        # The link to rank 0 has no limit: it may come back. The thread that judges finds a lost rank 0 by the clock.
        self._connection.settimeout(None if place == len(self._above) - 1 else self._patience_seconds)


def read_told(line: bytes, most_bytes: int) -> Told:
    """Read what a rank tells the one above it; NotAMessageError: its values do not fit."""
    message = read_message(line, most_bytes)
    found = {}
    for one in message.list("each"):
        if type(one) is not list or len(one) != 3 or type(one[0]) is not int:
            raise NotAMessageError("each is no list of ranks")
        number, beat, silent_seconds = one
        state = Message(beat=beat, silent_seconds=silent_seconds)
        found[number] = PeerState(_read_tuple(Heartbeat, state, "beat"), state.number("silent_seconds"))
    return Told(_read_tuple(Heartbeat, message, "beat"), _read_tuple(Digest, message, "digest"), found)


def _read_tuple(kind: type[Read], message: Message, key: str) -> Read:
    """Read a named tuple from a message; NotAMessageError: its values do not fit."""
    try:
        return as_tuple(kind, message.list(key))
    except TypeError as error:
        raise NotAMessageError(f"{key} is no {kind.__name__}") from error
