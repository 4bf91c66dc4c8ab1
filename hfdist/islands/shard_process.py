"""The process of a further shard of a parameter server: it serves ranks at a socket of its own, and obeys the server.

    rank    -- gradients -->    this process    -- what a rank has brought     -->    server
            <--  weights --                     <-- commands: step, give weights --

Gradients and weights are those of the parts that this shard has.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from hfdist.islands.member import Member
from hfdist.islands.membership import BEAT_SECONDS, Connection
from hfdist.islands.parameter_shard import ParameterShard
from hfdist.messages.door import Door, read_bytes, read_line
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message

_SERVER_SECONDS = 60.0
"""Seconds for which a server that does not answer is tried."""


class ShardProcess:
    """A shard that serves one job after another. Messages are read by an event loop; torch runs in one other thread.

    Args:
        listener: a listening socket, for ranks.
        address: HOST:PORT at which ranks reach that socket.
        server: HOST:PORT of the server.
        secret: the secret of all islands and their server; empty: there is none.
        say: takes a line for people.
    """

    def __init__(
        self, listener: socket.socket, address: str, *, server: str, secret: str = "", say: Callable[[str], None]
    ) -> None:
        self._listener, self._secret, self._say = listener, secret, say
        self._server = Member(server, secret, {}, {"shard": address}, _SERVER_SECONDS)
        self._shard: ParameterShard | None = None
        """The tensors of the present job; None: there is no job."""
        self._connections: dict[str, dict[int, Connection]] = {}
        """Connections of ranks, by the ticket of their island and by rank."""
        self._is_cancelled = False
        """Whether `serve` has ended, so that its thread must not begin another job."""

    async def serve(self) -> None:
        """Serve until the task is cancelled; PeerError: the server does not answer for a minute."""
        self._loop = asyncio.get_running_loop()
        # One thread for all that torch does: in a process that was forked, its first calls in two threads fail.
        self._loop.set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="parameters"))
        door = Door(self._secret, self._hear, self._say)
        async with await door.open(self._listener):
            beats = asyncio.create_task(self._beat())
            try:
                while True:
                    await asyncio.to_thread(self._serve_job)
                    self._shard = None
                    for ticket in list(self._connections):
                        self._close(ticket)
            finally:
                beats.cancel()
                self._is_cancelled = True
                self._server.close()

    async def _beat(self) -> None:
        """Tell the ranks that this process lives."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for connections in self._connections.values():
                for connection in connections.values():
                    connection.beat()

    def _serve_job(self) -> None:
        """Obey the server until it ends the connection, as it does when a job has ended."""
        self._server.connect()
        if self._is_cancelled:
            return
        while (message := self._server.wait_for("do")) is not None:
            command = message.mapping("do")
            answer: dict[str, object] = {}
            if "job" in command:
                self._shard = ParameterShard(command.mapping("job"), self._send)
            else:
                assert self._shard is not None
                answer = self._shard.obey(command)
            if "drop" in command:
                self._loop.call_soon_threadsafe(self._close, command.text("drop"))
            self._server.send({"done": answer})

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what a rank brings until its connection or the job ends; RefusedError: there is no job."""
        shard = self._shard
        if shard is None:
            raise RefusedError(refused="this shard has no job yet", may_pass=True)
        ticket, rank = hello.text("ticket"), hello.integer("rank")
        connection = Connection(writer, time.monotonic())
        of_island = self._connections.setdefault(ticket, {})
        of_island[rank] = connection
        connection.send({"welcome": ""})
        try:
            while shard is self._shard:
                message, payload = read_message(await read_line(reader)), b""
                if "bytes" in message:
                    num_bytes = message.integer("bytes", most=shard.most_bytes(rank, message))
                    payload = await read_bytes(reader, num_bytes, connection.hear)
                if "beat" not in message:
                    kept = shard.keep(ticket, rank, message, payload)
                    self._report(shard, {"ticket": ticket, "rank": rank, **kept})
        except NotAMessageError as error:
            self._report(shard, {"ticket": ticket, "bad": f"rank {rank} has sent what is {error}"})
        finally:
            # The rank may have connected anew, and its island may have been dropped and have come back.
            if of_island.get(rank) is connection:
                del of_island[rank]
            if not of_island and self._connections.get(ticket) is of_island:
                del self._connections[ticket]

    def _report(self, shard: ParameterShard, message: Mapping[str, object]) -> None:
        """Tell the server, unless the job of this shard has ended: another job's server must not hear of it."""
        if shard is self._shard:
            self._server.send(message)

    def _send(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        """Send to a rank; torch's thread calls this, and the connections belong to the event loop."""
        self._loop.call_soon_threadsafe(self._send_now, ticket, rank, message, payload)

    def _send_now(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        if rank in self._connections.get(ticket, {}):
            self._connections[ticket][rank].send(message, payload)

    def _close(self, ticket: str) -> None:
        """Close the connections of an island."""
        for connection in self._connections.pop(ticket, {}).values():
            connection.writer.close()
