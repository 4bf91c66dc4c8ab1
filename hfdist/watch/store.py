"""The exchange of heartbeats: rank 0 serves the others on a free port, apart from the stores of torch and launcher.

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
from collections.abc import Sequence

from hfdist.collectives import gather_json, rank, world_size
from hfdist.launch.address import LOOPBACK, find_route, is_loopback, listen
from hfdist.messages.door import MOST_STRANGERS, Door, DoorThread, hear_answer, knock, read_line
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message, write_message
from hfdist.topology import read_launcher
from hfdist.watch.diagnosis import Diagnosis, Heartbeat, Read, as_tuple

_CONNECT_SECONDS = 30
_MOST_BYTES = 2**16
"""The most bytes of a line, which is one message."""

Exchanged = tuple[dict[int, Heartbeat], Diagnosis | None]
"""The last heartbeats of the ranks that this rank follows, and the verdict of rank 0."""


def open_store() -> HostedStore | JoinedStore:
    """Connect all ranks with rank 0. A collective.

    Raises:
        OSError: some rank cannot reach rank 0. On all ranks alike.
    """
    own, size = rank(), world_size()
    # A rank that is lost before its first beat must have a host and a pid, too.
    known = [Heartbeat(number=0, host=host, pid=pid) for host, pid in gather_json([platform.node(), os.getpid()])]
    is_here = len({beat.host for beat in known}) == 1 and not read_launcher().has_other_machines
    store: HostedStore | JoinedStore | None = None
    problem, told = None, None
    if own == 0:
        try:
            own_address, listens_at = (LOOPBACK, LOOPBACK) if is_here else _own_address()
            store = host = HostedStore(size, known, listens_at)
            told = [own_address, host.port, host.token]
        except OSError as error:
            problem = f"rank 0 cannot serve the others ({error})"
    told = gather_json(told)[0]
    if own != 0 and told is not None:
        address, port, token = told
        try:
            store = JoinedStore(address, port, token, own, size)
        except OSError as error:
            problem = f"rank {own} cannot reach rank 0 at {address}:{port} ({error})"
    problems = [found for found in gather_json(problem) if found is not None]
    if problems:
        if store is not None:
            store.close()
        raise OSError(problems[0])
    assert store is not None
    return store


class HostedStore:
    """The store of rank 0: served by a thread of its own, which answers every beat with rank 0's and the verdict.

    Args:
        world_size: number of ranks.
        known: a first heartbeat of each rank.
        host: address at which this process listens.
    """

    rank = 0

    def __init__(self, world_size: int, known: Sequence[Heartbeat] | None = None, host: str = LOOPBACK) -> None:
        known = known or [Heartbeat(number=0)] * world_size
        self.world_size = world_size
        self.token = secrets.token_hex(16)
        """Known to the ranks of this run."""
        self._beats = dict(enumerate(known))
        self._verdict: Diagnosis | None = None
        self._answer = b""
        self.exchange(known[0], None)
        # All ranks come at once.
        door = Door(self.token, self._hear, most_strangers=MOST_STRANGERS + 2 * world_size)
        self._served = DoorThread(door, listen(host, 0), "watch-store")
        self.port = self._served.port

    def exchange(self, own: Heartbeat, verdict: Diagnosis | None) -> Exchanged:
        """Publish rank 0's heartbeat and verdict, and give the heartbeats of all ranks. Never waits."""
        self._verdict = verdict or self._verdict
        self._beats[0] = own
        self._answer = write_message({"beat": own, "verdict": self._verdict})
        return dict(self._beats), self._verdict

    def close(self) -> None:
        """Serve no more."""
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank's beats, until it ends the connection or sends what no rank would."""
        rank = hello.integer("rank", least=1, most=self.world_size - 1)
        while True:
            self._beats[rank] = _read_tuple(Heartbeat, read_message(await read_line(reader, _MOST_BYTES)), "beat")
            writer.write(self._answer)
            await writer.drain()


class JoinedStore:
    """The store of the other ranks: a connection to rank 0.

    Raises:
        OSError: there is none.
    """

    def __init__(self, address: str, port: int, token: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        try:
            self._connection, self._answers = knock((address, port), token, {"rank": rank}, {}, _CONNECT_SECONDS)
        except (NotAMessageError, RefusedError) as error:
            raise ConnectionRefusedError(f"that is not rank 0 of this run: {error}") from error
        # A link that comes back goes on where it was: who is lost is for others to judge, by the clock.
        self._connection.settimeout(None)

    def exchange(self, own: Heartbeat, verdict: Diagnosis | None) -> Exchanged:
        """Send a heartbeat, and wait for that of rank 0 and its verdict.

        It may not return before `close`, as rank 0 may be stopped: the thread that judges must not call it.

        Raises:
            OSError: the connection has ended.
        """
        self._connection.sendall(write_message({"beat": own}))
        try:
            answer = hear_answer(self._answers)
            beat = _read_tuple(Heartbeat, answer, "beat")
            published = None if answer.get("verdict") is None else _read_tuple(Diagnosis, answer, "verdict")
        except (NotAMessageError, RefusedError) as error:
            raise ConnectionResetError(f"rank 0 has sent what it should not: {error}") from error
        return {0: beat}, published or verdict

    def close(self) -> None:
        """End the connection, and with it whatever waits for it."""
        with contextlib.suppress(OSError):  # ended before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _read_tuple(kind: type[Read], message: Message, key: str) -> Read:
    """Read a named tuple from a message; NotAMessageError: its values do not fit."""
    try:
        return as_tuple(kind, message.list(key))
    except TypeError as error:
        raise NotAMessageError(f"{key} is no {kind.__name__}") from error


def _own_address() -> tuple[str, str]:
    """Give the address at which others reach this process, and the one at which it listens; "": all addresses.

    It is the address from which this process reaches MASTER_ADDR, which may be on another machine than rank 0 under
    torchrun. Where MASTER_ADDR leads to this machine's loopback, the others know this machine by that name.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        _, own = find_route(master, wait_seconds=0.0)
    except OSError:
        return master, ""
    return (master, "") if is_loopback(own) else (own, own)
