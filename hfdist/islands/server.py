"""The server of islands: all ranks of all islands are connected to it. Lost is who ends its connection or is silent."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hfdist.config.islands import IslandMethod
from hfdist.errors import ConfigError
from hfdist.islands.membership import BEAT_SECONDS, MOST_BYTES, SECRET, Connection, Coordinator, Island
from hfdist.islands.rendezvous import Rendezvous

_PARAMETER_SERVER = "hfdist.islands.parameter_server"


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
        least: islands with which the training begins; None: as many as they say.
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
        self._islands: dict[int, Island] = {}
        self._coordinator: Coordinator | None = None
        """Of the job whose islands are there; None: none are."""
        self._nonce = secrets.token_hex(16)
        """Known to who is connected here: marks what islands send each other."""

    async def serve(self) -> None:
        """Serve until it is cancelled."""
        # One thread for all that torch does: in a process that was forked, its first calls in two threads fail.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="parameters"))
        server = await asyncio.start_server(self._hear, sock=self._listener, limit=MOST_BYTES)
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

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        island: Island | None = None
        connection = Connection(writer, time.monotonic())
        # What no rank would send ends a connection, too.
        wrong = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, asyncio.CancelledError)
        with contextlib.suppress(*wrong):
            try:
                hello = json.loads(await reader.readline())
                if _has_parameter_server(hello.get("job", {})):
                    # It loads torch, which takes seconds: not in this thread, which hears beats.
                    await asyncio.to_thread(_check_parameter_server, hello["job"])
                island, rank = self._admit(hello, connection)
                while (line := await reader.readline()).endswith(b"\n"):
                    message = json.loads(line)
                    payload = await _read_payload(reader, int(message.get("bytes", 0)), connection)
                    connection.heard_seconds = time.monotonic()
                    if self._islands.get(island.index) is not island or self._coordinator is None:
                        break
                    if "bye" in message:
                        self._lose(island, "it has ended")
                        break
                    self._coordinator.take(island, rank, message, payload)
            except _RefusedError as error:
                connection.send(error.answer)
                await writer.drain()
        if island is not None and connection in island.connections.values():
            self._lose(island, "a connection has ended")
        writer.close()

    def _admit(self, hello: dict[str, Any], connection: Connection) -> tuple[Island, int]:
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
            island = self._islands[index] = Island(index, start)
        if rank == 0:
            island.job, island.addresses = hello["job"], [str(one) for one in hello["addresses"]]
            if self._coordinator is None:
                self._coordinator = self._make_coordinator(island.job)
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

    def _make_coordinator(self, job: dict[str, Any]) -> Coordinator:
        if not _has_parameter_server(job):
            return Rendezvous(self._islands, self._least, self._say)
        made: Coordinator = importlib.import_module(_PARAMETER_SERVER).ParameterServer(
            job, self._islands, self._least, self._say
        )
        return made

    def _lose(self, island: Island, why: str) -> None:
        if self._islands.get(island.index) is not island:
            return
        del self._islands[island.index]
        for connection in island.connections.values():
            connection.writer.close()
        self._say(f"island {island.index} has left: {why}")
        if self._coordinator is not None:
            self._coordinator.lose(island.index)
        if not self._islands:
            # The next one counts exchanges anew: what is still under way must not pass for one of these.
            self._coordinator, self._nonce = None, secrets.token_hex(16)


def _has_parameter_server(job: dict[str, Any]) -> bool:
    return job.get("islands.method") == IslandMethod.parameter_server.value


def _check_parameter_server(job: dict[str, Any]) -> None:
    try:
        importlib.import_module(_PARAMETER_SERVER).check_job(job)
    except ConfigError as error:
        refused = f"the server cannot serve this: {error.what}"
        raise _RefusedError(refused=refused, key=error.where, found=f"{error.found}") from error


async def _read_payload(reader: asyncio.StreamReader, num_bytes: int, connection: Connection) -> bytes:
    """Read what follows a message. Who sends it is not silent."""
    chunks, missing = [], num_bytes
    while missing > 0:
        chunks.append(await reader.readexactly(min(missing, MOST_BYTES)))
        missing -= len(chunks[-1])
        connection.heard_seconds = time.monotonic()
    return b"".join(chunks)
