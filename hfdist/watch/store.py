"""The exchange of heartbeats along the tree of ranks: each rank with others below it serves them on a port of its own.

    rank below                            rank above
      Report: own beat, digest, each  ->
                                      <-  Answer: rank 0's beat, its verdict, asks_each      once in each beat

The ports are apart from the stores of torch and of the launcher. They are served by Python's own sockets
and not by torch's TCPStore, because it must be possible to end each wait: a thread that comes back from torch's C++
while the interpreter ends aborts the process ("terminate called without an active exception", Python 3.11 to 3.13), and
no call of TCPStore is sure to come back before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Sequence
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
"""Seconds in which the first connection to the rank above must be made."""
_MOST_BYTES = 2**16
"""Most bytes of a message, which is one line, without its part about each rank below the speaker."""
_MOST_BYTES_OF_EACH = 2**10
"""Most bytes of that part for each rank."""
_PATIENCE_BEATS = 2
"""Beats without an answer after which a rank turns to the next one above."""
_LEAST_PATIENCE_SECONDS = 1.0
"""Least seconds without an answer after which a rank turns to the next one above."""
_RETURN_SECONDS = 60.0
"""Seconds after which a rank tries the nearest one above again: it may have been busy, and rank 0 cannot hear
thousands."""


class Answer(NamedTuple):
    """The message that goes down the tree: what rank 0 says."""

    beat: Heartbeat
    """Rank 0's newest heartbeat."""
    verdict: Diagnosis | None = None
    """Why the run must end; None: it goes on."""
    asks_each: bool = False
    """Whether rank 0 wants to hear of each rank."""


class Report(NamedTuple):
    """The message that goes up the tree: what a rank says to the one above it."""

    beat: Heartbeat
    """Heartbeat of the rank that speaks."""
    digest: Digest
    """What the rank says of all ranks below it together."""
    each: dict[int, PeerState]
    """What the rank knows of each rank below it; empty: rank 0 has not asked, and all is well."""


class _Address(NamedTuple):
    """Where a rank serves those below it."""

    host: str
    port: int


def open_store(beat_seconds: float) -> Store:
    """Connect each rank with the one above it in the tree. A collective.

    Args:
        beat_seconds: seconds between two heartbeats.

    Returns:
        This rank's place in the tree.

    Raises:
        OSError: some rank cannot reach the one above it. On all ranks alike.
    """
    own = rank()
    # A rank that is lost before its first beat must have a host and a pid, too.
    known = [Heartbeat(number=0, host=host, pid=pid) for host, pid in gather_json([platform.node(), os.getpid()])]
    parents = find_parents(machines())
    token = gather_json(secrets.token_hex(16) if own == 0 else None)[0]
    below = Below(own, known, parents, time.monotonic())
    hosted: HostedStore | None = None
    joined: JoinedStore | None = None
    address: _Address | None = None
    problem: str | None = None
    if len(below) or own == 0:
        try:
            hosted, address = _serve(below, own, token)
        except OSError as error:
            problem = f"rank {own} cannot serve the others ({error})"
    # All take part in both gathers, also a rank that has failed: the others would wait for it.
    addresses = [None if found is None else _Address(*found) for found in gather_json(address)]
    above = find_above(own, parents)
    addresses_above = [found for found in (addresses[number] for number in above) if found is not None]
    # Where one of them cannot serve, that rank says so.
    if above and len(addresses_above) == len(above):
        try:
            joined = JoinedStore(addresses_above, token, own, beat_seconds)
        except OSError as error:
            problem = f"rank {own} cannot reach rank {above[0]} at {list(addresses_above[0])} ({error})"
    store = Store(own, world_size(), below, hosted, joined)
    problem = first_problem(problem)
    if problem is not None:
        store.close()
        raise OSError(problem)
    return store


def _serve(below: Below, own: int, token: str) -> tuple[HostedStore, _Address]:
    """Serve the ranks below this one, at an address that they can reach; OSError: there is none."""
    is_one_machine = len(machines()) == 1 and not read_launcher().has_other_machines
    host, listens_at = (LOOPBACK, LOOPBACK) if is_one_machine else own_address(own)
    hosted = HostedStore(below, world_size(), token, listens_at)
    return hosted, _Address(host, hosted.port)


class Store:
    """A rank's place in the tree, with its connections to the ranks below and to the one above.

    Args:
        rank: number of this rank.
        world_size: number of ranks.
        below: what this rank has heard of the ranks below it.
        hosted: the server for the ranks below; None: there are no such ranks.
        joined: the connection to the rank above; None: this is rank 0.
    """

    def __init__(
        self, rank: int, world_size: int, below: Below, hosted: HostedStore | None, joined: JoinedStore | None
    ) -> None:
        self.rank, self.world_size, self.below = rank, world_size, below
        self._hosted, self._joined = hosted, joined
        self._asks_each = False
        """Whether rank 0 wanted to hear of each rank in its last answer."""

    def exchange(
        self, own: Heartbeat, verdict: Diagnosis | None, beat_seconds: float, *, asks_each: bool = False
    ) -> tuple[Heartbeat, Diagnosis | None]:
        """Send a heartbeat with what this rank says of those below it, and wait for the answer of rank 0.

        The call may not return before `close`, as the ranks above may be stopped: the thread that judges must not make
        it. On rank 0 it never waits.

        Args:
            own: heartbeat of this rank.
            verdict: this rank's verdict, if it has one; rank 0's goes to all.
            beat_seconds: seconds between two beats.
            asks_each: on rank 0, whether it wants to hear of each rank.

        Returns:
            Rank 0's newest heartbeat, and its verdict, or else `verdict`.

        Raises:
            OSError: the connection has ended, and there is nobody else above.
        """
        answer = Answer(own, verdict, asks_each)
        if self._joined is not None:
            now = time.monotonic()
            digest = self.below.digest(now, beat_seconds)
            says_each = digest.is_noted or self._asks_each
            each = self.below.states(now, beat_seconds) if says_each else {}
            try:
                answer = self._joined.tell(Report(own, digest, each))
            except OSError:
                if self._hosted is not None and verdict is None and own.left is None:
                    # The ranks below are well: they shall turn to the next one above. With a verdict, or when this
                    # rank leaves, they may still ask this one.
                    self._hosted.close()
                raise
            self._asks_each = answer.asks_each
        if self._hosted is not None:
            self._hosted.publish(answer)
        return answer.beat, answer.verdict or verdict

    def close(self) -> None:
        """Stop serving, and end the connection, with whatever waits for it."""
        if self._joined is not None:
            self._joined.close()
        if self._hosted is not None:
            self._hosted.close()


class HostedStore:
    """The server of a rank for the ranks below it: a thread that answers every beat with what rank 0 says.

    Args:
        below: the record of what the ranks below say; the thread writes into it.
        world_size: number of ranks.
        token: secret that the ranks of this run know.
        host: address at which this process listens, on a free port.

    Raises:
        OSError: this process cannot listen there.
    """

    def __init__(self, below: Below, world_size: int, token: str, host: str = LOOPBACK) -> None:
        self.world_size, self.token = world_size, token
        self._below = below
        self._most_bytes = _MOST_BYTES + _MOST_BYTES_OF_EACH * world_size
        self.publish(Answer(below.of_rank_0))
        # All ranks may connect at once, and each counts as a stranger until it has proven that it knows the token.
        door = Door(self.token, self._hear, most_strangers=MOST_STRANGERS + 2 * world_size)
        self._served = DoorThread(door, listen(host, 0), "watch-store")
        self.port = self._served.port

    def publish(self, answer: Answer) -> None:
        """Set the answer to the ranks below, until the next one is set."""
        self._answer = write_message(answer._asdict())

    def close(self) -> None:
        """Stop serving."""
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank's beats, until it ends the connection or sends what no rank would."""
        speaker = hello.integer("rank", least=1, most=self.world_size - 1)
        if speaker not in self._below:
            raise NotAMessageError(f"rank {speaker} is not below this one")
        while True:
            report = read_report(await read_line(reader, self._most_bytes), self._most_bytes)
            self._below.hear(speaker, report.beat, report.digest, report.each, time.monotonic())
            writer.write(self._answer)
            await writer.drain()


class JoinedStore:
    """The connection of a rank to the nearest rank above it that answers.

    above[0] --no answer--> above[1] --no answer--> ... --> above[-1], rank 0: waits without a limit
       ^                        |                              |
       +-- tried again after _RETURN_SECONDS ------------------+

    Args:
        above: addresses of the ranks above, as host and port, the nearest first; the last is rank 0's.
        token: secret that the ranks of this run know.
        rank: number of this rank.
        beat_seconds: seconds between two heartbeats.

    Raises:
        OSError: the nearest rank above cannot be reached.
    """

    def __init__(self, above: Sequence[tuple[str, int]], token: str, rank: int, beat_seconds: float) -> None:
        self._above, self._token, self._rank = above, token, rank
        self._patience_seconds = max(_PATIENCE_BEATS * beat_seconds, _LEAST_PATIENCE_SECONDS)
        self._returns_at = 0.0
        """Time of the monotonic clock at which the nearest rank is tried again, after a connection to it was lost."""
        self._is_closed = False
        self._connect(0, _CONNECT_SECONDS)

    def tell(self, report: Report) -> Answer:
        """Send a report, and wait for the answer; a rank that does not answer is left for the next one above.

        Raises:
            OSError: the connection has ended, and there is nobody else above.
        """
        each = [[number, *state] for number, state in report.each.items()]
        message = write_message({"beat": report.beat, "digest": report.digest, "each": each})
        if self._place > 0 and time.monotonic() > self._returns_at:
            self._returns_at = time.monotonic() + _RETURN_SECONDS
            # If it cannot be reached, the present connection stays.
            with contextlib.suppress(OSError):
                self._connect(0, self._patience_seconds)
        while True:
            try:
                self._connection.sendall(message)
                return _read_answer(hear_answer(self._answers))
            except (NotAMessageError, RefusedError) as error:
                raise ConnectionResetError(f"the rank above has sent what it should not: {error}") from error
            except OSError as error:
                self._go_further(error)

    def close(self) -> None:
        """End the connection, and with it whatever waits for it."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # the connection has ended before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _go_further(self, error: OSError) -> None:
        """Connect with the nearest rank above the one that is lost; raise `error` if none can be reached."""
        self._connection.close()
        self._returns_at = time.monotonic() + _RETURN_SECONDS
        for place in range(self._place + 1, len(self._above)):
            try:
                self._connect(place, self._patience_seconds)
            except OSError:
                continue
            return
        raise error

    def _connect(self, place: int, timeout_seconds: float) -> None:
        """Connect with the rank at `above[place]`; OSError: that fails, or `close` was called meanwhile."""
        address = self._above[place]
        try:
            connection, answers = knock(address, self._token, {"rank": self._rank}, {}, timeout_seconds)
        except (NotAMessageError, RefusedError) as error:
            raise ConnectionRefusedError(f"that is no rank of this run: {error}") from error
        self._place, self._connection, self._answers = place, connection, answers
        if self._is_closed:
            # `close`, in another thread, has ended the connection before this one.
            self.close()
            raise ConnectionAbortedError("this rank leaves")
        # The link to rank 0 has no limit: it may come back. The thread that judges finds a lost rank 0 by the clock.
        is_rank_0 = place == len(self._above) - 1
        self._connection.settimeout(None if is_rank_0 else self._patience_seconds)


def read_report(line: bytes, most_bytes: int) -> Report:
    """Read the message of a rank to the one above it.

    Args:
        line: the message as bytes, with JSON.
        most_bytes: most bytes that it may have.

    Raises:
        NotAMessageError: the line is too long, or its values do not fit.
    """
    message = read_message(line, most_bytes)
    each = {}
    for entry in message.list("each"):
        if type(entry) is not list or len(entry) != 3 or type(entry[0]) is not int:
            raise NotAMessageError("each is no list of ranks")
        number, beat, silent_seconds = entry
        state = Message(beat=beat, silent_seconds=silent_seconds)
        each[number] = PeerState(_read_tuple(Heartbeat, state, "beat"), state.number("silent_seconds"))
    return Report(_read_tuple(Heartbeat, message, "beat"), _read_tuple(Digest, message, "digest"), each)


def _read_answer(message: Message) -> Answer:
    """Read the answer of a rank to one below it; NotAMessageError: its values do not fit."""
    beat = _read_tuple(Heartbeat, message, "beat")
    verdict = None if message.get("verdict") is None else _read_tuple(Diagnosis, message, "verdict")
    return Answer(beat, verdict, message.flag("asks_each"))


def _read_tuple(kind: type[Read], message: Message, key: str) -> Read:
    """Read a named tuple from a message; NotAMessageError: its values do not fit."""
    try:
        return as_tuple(kind, message.list(key))
    except TypeError as error:
        raise NotAMessageError(f"{key} is no {kind.__name__}") from error
