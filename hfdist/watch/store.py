"""Where ranks leave their beats: rank 0 serves the others on a free port, apart from the stores of torch and launcher.

By Python's own sockets and not by torch's TCPStore, because each wait must be one that can be ended: a thread that
comes back from torch's C++ while the interpreter ends aborts the process ("terminate called without an active
exception", Python 3.11 to 3.13), and none of TCPStore's calls is bound to come back before.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import platform
import secrets
import socket
import threading
from collections.abc import Sequence

from hfdist.collectives import gather_json, rank, world_size
from hfdist.jobs.address import find_route, is_loopback, listen
from hfdist.watch.diagnosis import Diagnosis, Heartbeat

_CONNECT_SECONDS = 30
_MOST_BYTES = 2**16
"""Of a line: one message."""

Exchanged = tuple[dict[int, Heartbeat], Diagnosis | None]
"""The last heartbeats of the ranks that this rank follows, and the verdict of rank 0."""


def open_store() -> HostedStore | JoinedStore:
    """Connect all ranks with rank 0. A collective.

    Raises:
        OSError: some rank cannot reach rank 0. On all ranks alike.
    """
    own, size = rank(), world_size()
    # Who is lost before its first beat has come must have a name, too.
    known = [Heartbeat(number=0, host=host, pid=pid) for host, pid in gather_json([platform.node(), os.getpid()])]
    host = HostedStore(size, known) if own == 0 else None
    address, port, token = gather_json(None if host is None else [_own_address(), host.port, host.token])[0]
    store: HostedStore | JoinedStore | None = host
    problem = None
    if store is None:
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
    """That of rank 0: served by a thread of its own, which answers every beat with rank 0's and the verdict."""

    rank = 0

    def __init__(self, world_size: int, known: Sequence[Heartbeat] | None = None) -> None:
        known = known or [Heartbeat(number=0)] * world_size
        self.world_size = world_size
        self.token = secrets.token_hex(16)
        """The first word of whoever is a rank of this run."""
        self._beats = {place: json.dumps(beat).encode() for place, beat in enumerate(known)}
        self._verdict: Diagnosis | None = None
        self._answer = b""
        self.exchange(known[0], None)
        self._listener = listen("", 0)
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watch-store", daemon=True)
        self._thread.start()

    def exchange(self, own: Heartbeat, verdict: Diagnosis | None) -> Exchanged:
        """Publish rank 0's heartbeat and verdict, and give the heartbeats of all ranks. Never waits."""
        self._verdict = verdict or self._verdict
        self._beats[0] = json.dumps(own).encode()
        self._answer = json.dumps([own, self._verdict]).encode() + b"\n"
        return {other: Heartbeat(*json.loads(text)) for other, text in list(self._beats.items())}, self._verdict

    def close(self) -> None:
        """Serve no more."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._hear, sock=self._listener, limit=_MOST_BYTES, backlog=self.world_size)
        await self._closed.wait()
        server.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank's beats, until it ends the connection or sends what no rank would."""
        # Cancelled where the store closes: that ends it as well.
        with contextlib.suppress(OSError, ValueError, asyncio.CancelledError):
            token, _, number = (await reader.readline()).partition(b" ")
            if not hmac.compare_digest(token, self.token.encode()):
                raise ValueError("not a rank of this run")
            while (beat := await reader.readline()).endswith(b"\n"):
                self._beats[int(number)] = beat
                writer.write(self._answer)
                await writer.drain()
        writer.close()


class JoinedStore:
    """That of the other ranks: a connection to rank 0.

    Raises:
        OSError: there is none.
    """

    def __init__(self, address: str, port: int, token: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        # A link that comes back goes on where it was: who is lost is for others to judge, by the clock.
        self._connection.settimeout(None)
        self._connection.sendall(f"{token} {rank}\n".encode())
        self._answers = self._connection.makefile("rb")

    def exchange(self, own: Heartbeat, verdict: Diagnosis | None) -> Exchanged:
        """Send a heartbeat, and wait for that of rank 0 and its verdict.

        It may not return before `close`, as rank 0 may be stopped: the thread that judges must not call it.

        Raises:
            OSError: the connection has ended.
        """
        self._connection.sendall(json.dumps(own).encode() + b"\n")
        answer = self._answers.readline(_MOST_BYTES)
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("rank 0 has ended the connection")
        beat, published = json.loads(answer)
        return {0: Heartbeat(*beat)}, verdict if published is None else Diagnosis(*published)

    def close(self) -> None:
        """End the connection, and with it whatever waits for it."""
        with contextlib.suppress(OSError):  # ended before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _own_address() -> str:
    """Give the address under which others reach this process: the one from which it reaches MASTER_ADDR.

    That is not always MASTER_ADDR: torchrun's may be another machine than that of rank 0. Where it leads to this very
    machine by its loopback, its name is what the others know.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        _, own = find_route(master, wait_seconds=0.0)
    except OSError:
        return master
    return master if is_loopback(own) else own
