"""The process of a shard of a parameter server: it hears ranks at a socket of its own, and obeys the server."""

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

_LOOKED_FOR_SECONDS = 60.0


class ShardProcess:
    """Serves one job after another.

    Args:
        listener: a listening socket, for ranks.
        address: HOST:PORT at which they reach it.
        server: HOST:PORT of the server.
        secret: that all islands and their server know; empty: none.
        say: takes a line for people.
    """

    def __init__(
        self, listener: socket.socket, address: str, *, server: str, secret: str = "", say: Callable[[str], None]
    ) -> None:
        self._listener, self._secret, self._say = listener, secret, say
        self._server = Member(server, secret, {}, {"shard": address}, _LOOKED_FOR_SECONDS)
        self._shard: ParameterShard | None = None
        """None: there is no job."""
        self._connections: dict[str, dict[int, Connection]] = {}
        """Connections of an island's ranks, by its ticket and by rank."""
        self._is_cancelled = False

    async def serve(self) -> None:
        """Serve until it is cancelled; PeerError: the server does not answer for a minute."""
        self._loop = asyncio.get_running_loop()
        # One thread for all that torch does, as in the server.
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
            command, answer = message.mapping("do"), dict[str, object]()
            if "job" in command:
                self._shard = ParameterShard(command.mapping("job"), self._send)
            else:
                assert self._shard is not None
                answer = self._shard.obey(command)
            if "drop" in command:
                self._loop.call_soon_threadsafe(self._close, command.text("drop"))
            self._server.send({"done": answer})

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shard = self._shard
        if shard is None:
            raise RefusedError(refused="this shard has no job yet", may_pass=True)
        ticket, rank, connection = hello.text("ticket"), hello.integer("rank"), Connection(writer, time.monotonic())
        own = self._connections.setdefault(ticket, {})
        own[rank] = connection
        connection.send({"welcome": ""})
        try:
            while shard is self._shard:
                message, payload = read_message(await read_line(reader)), b""
                if "bytes" in message:
                    num_bytes = message.integer("bytes", most=shard.most_bytes(rank, message))
                    payload = await read_bytes(reader, num_bytes, connection.hear)
                if "beat" not in message:
                    self._report(shard, {"ticket": ticket, "rank": rank, **shard.keep(ticket, rank, message, payload)})
        except NotAMessageError as error:
            self._report(shard, {"ticket": ticket, "bad": f"rank {rank} has sent what is {error}"})
        finally:
            if own.get(rank) is connection:
                del own[rank]
            if not own and self._connections.get(ticket) is own:
                del self._connections[ticket]

    def _report(self, shard: ParameterShard, message: Mapping[str, object]) -> None:
        # Once the job has ended, the connection is closed, or is that of another one.
        if shard is self._shard:
            self._server.send(message)

    def _send(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        self._loop.call_soon_threadsafe(self._send_now, ticket, rank, message, payload)

    def _send_now(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        if rank in self._connections.get(ticket, {}):
            self._connections[ticket][rank].send(message, payload)

    def _close(self, ticket: str) -> None:
        for connection in self._connections.pop(ticket, {}).values():
            connection.writer.close()
