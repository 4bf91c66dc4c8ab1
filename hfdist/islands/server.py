"""The server of islands: it knows which islands are there, and passes what their ranks say to the job's coordinator.

All ranks of all islands are connected to it, and the shards of a parameter server. The first island brings the job, for
which a coordinator is made; other islands must have the same job. An island is lost when one of its connections ends or
is silent, and the job ends with its last island.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hfdist.config.islands import IslandMethod
from hfdist.errors import ConfigError, first_line, printable
from hfdist.islands.membership import BEAT_SECONDS, Connection, Coordinator, Island, JobIslands
from hfdist.islands.rendezvous import Rendezvous
from hfdist.islands.shard_link import ShardLink
from hfdist.messages.door import Door, read_bytes, read_line
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message

# These modules are imported by name when a job needs them: they load torch, and a server of rounds does without.
_PARAMETER_SERVER, _PARAMETER_SHARD = "hfdist.islands.parameter_server", "hfdist.islands.parameter_shard"
_MOST_PLACES = 2**20
"""The most islands, and the most ranks of one island."""
_MOST_SAID = 200
"""The most characters of a text of an island that a line for people shows."""
_MOST_WHY = 1000
"""The most characters of the reason that an island is told when it is ended."""
_COMPLETE_SECONDS = 60.0
"""Seconds in which all ranks of an island must have come: to let rank 0 in, this server may have to load torch."""
_ADDRESS = re.compile(r"tcp://(?:\[[0-9a-fA-F:.%\w]{2,64}\]|[\w.-]{1,255}):(?P<port>\d{1,5})", re.ASCII)


class IslandServer:
    """A server for the islands of one job at a time.

    Args:
        listener: a listening socket.
        secret: the secret that all islands know; empty: there is none.
        least: number of islands with which the training begins; None: as many as the job says.
        silent_seconds: seconds without a word from a rank after which its island is lost.
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
        self._listener, self._secret = listener, secret
        self._silent_seconds, self._say = silent_seconds, say
        self._islands: dict[int, Island] = {}
        """The islands that are there, by index."""
        self._shown = JobIslands(connected=self._islands, least=least, end=self._end, say=say)
        self._coordinator: Coordinator | None = None
        """Coordinator of the job whose islands are connected; None: no island is connected."""
        self._free_shards: list[ShardLink] = []
        """Shards that serve no job."""
        self._shards: list[ShardLink] = []
        """Shards of the job whose islands are connected."""
        self._nonce = secrets.token_hex(16)
        """Text that only connected ranks know: it marks what islands send each other."""

    async def serve(self) -> None:
        """Serve until the task is cancelled."""
        # One thread for all that torch does: in a process that was forked, its first calls in two threads fail.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="parameters"))
        door = Door(self._secret, self._hear, self._say)
        async with await door.open(self._listener):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._beat()

    def _beat(self) -> None:
        """Tell all connections that this server lives, and lose those that have been silent for too long."""
        now = time.monotonic()
        for island in list(self._islands.values()):
            for rank, connection in list(island.connections.items()):
                silent = now - connection.heard_seconds
                if silent > self._silent_seconds:
                    self._lose(island, f"rank {rank} is silent for {silent:.0f} s")
                    break
                connection.beat()
            if not island.is_complete and now - island.since > max(_COMPLETE_SECONDS, self._silent_seconds):
                self._lose(island, "not all of its ranks have come")
        for link in self._free_shards + self._shards:
            if now - link.connection.heard_seconds > self._silent_seconds:
                link.connection.writer.transport.abort()
            else:
                link.connection.beat()
        if self._coordinator is not None:
            self._coordinator.tick()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer, time.monotonic())
        if "shard" in hello:
            await self._hear_shard(hello, reader, connection)
        else:
            await self._hear_rank(hello, reader, connection)

    async def _hear_shard(self, hello: Message, reader: asyncio.StreamReader, connection: Connection) -> None:
        """Keep the connection of a shard until it ends; with it the islands of its job end."""
        link = ShardLink(connection, hello.text("shard"))
        _check_address(f"tcp://{link.address}", "shard")
        self._free_shards.append(link)
        connection.send({"welcome": self._nonce})
        self._say(f"a shard is there, at {link.address}")
        try:
            await link.hear(reader)
        finally:
            if link in self._free_shards:
                self._free_shards.remove(link)
                self._say(f"the shard at {link.address} has left")
            elif link in self._shards:
                # This server itself is shard 1.
                why = f"shard {2 + self._shards.index(link)} of the server, at {link.address}, has ended"
                for island in list(self._islands.values()):
                    self._end(island, why)

    async def _hear_rank(self, hello: Message, reader: asyncio.StreamReader, connection: Connection) -> None:
        """Let a rank in, and act on what it sends until its connection ends.

        Raises:
            RefusedError: the rank is not let in.
            NotAMessageError: its hello is not one that a rank sends.
        """
        if _has_parameter_server(hello):
            # This loads torch, which takes seconds: not in this thread, which hears beats.
            await asyncio.to_thread(_check_parameter_server, hello.mapping("job"))
            # The rank could not beat meanwhile: it does once it is welcome.
            connection.hear()
        island, rank = self._admit(hello, connection)
        try:
            while await self._hear_message(island, rank, reader, connection):
                pass
        except NotAMessageError as error:
            self._end(island, f"rank {rank} has sent what is {error}")
        finally:
            if connection in island.connections.values():
                self._lose(island, "a connection has ended")

    async def _hear_message(
        self, island: Island, rank: int, reader: asyncio.StreamReader, connection: Connection
    ) -> bool:
        """Act on one message of a rank; False: the rank is not heard any more."""
        message = read_message(await read_line(reader))
        connection.hear()
        if self._islands.get(island.index) is not island:
            return False
        if self._coordinator is None:
            # Rank 0 is still on its way, and nobody has anything to say before it has come.
            return "beat" in message
        payload = b""
        if "bytes" in message:
            num_bytes = message.integer("bytes", most=self._coordinator.most_bytes(rank, message))
            payload = await read_bytes(reader, num_bytes, connection.hear)
            # The island may have been lost while the bytes came.
            if self._islands.get(island.index) is not island:
                return False
        if "bye" in message:
            self._lose(island, "it has ended")
            return False
        if "beat" not in message:
            self._coordinator.take(island, rank, message, payload)
        return True

    def _admit(self, hello: Message, connection: Connection) -> tuple[Island, int]:
        """Add the connection of a rank to its island; rank 0 brings the job, and may make it the server's job.

        Returns:
            The island and the rank.

        Raises:
            RefusedError: the rank is not let in.
            NotAMessageError: no rank would send this hello.
        """
        index, rank = (hello.integer(key, most=_MOST_PLACES) for key in ("island", "rank"))
        start = hello.text("start", most=64)
        island = self._islands.get(index)
        if island is not None and island.start != start:
            # Perhaps for a moment: an island that was cut off has started anew, and this server has not noticed yet.
            what = "an island with this index is there already"
            raise RefusedError(refused=what, key="islands.index", found=index, may_pass=True)
        if island is not None and rank in island.connections:
            # The rank has lost its earlier connection, and this server has not noticed yet.
            self._lose(island, "it has connected anew")
            island = None
        job = Message()
        addresses: list[str] = []
        if rank == 0:
            job = hello.mapping("job")
            addresses = _read_addresses(hello, are_used=not _has_parameter_server(hello))
            self._check_job(index, job)
            self._coordinator = self._coordinator or self._make_coordinator(job)
        if island is None:
            island = self._islands[index] = Island(index, start)
        welcome: dict[str, object] = {"welcome": self._nonce}
        if rank == 0:
            island.job, island.addresses = job, addresses
            welcome |= {"ticket": island.ticket, "shards": [link.address for link in self._shards]}
        if island.addresses and rank >= len(island.addresses):
            raise NotAMessageError(f"rank {rank} of {len(island.addresses)}")
        island.connections[rank] = connection
        connection.send(welcome)
        if island.is_complete:
            self._say(f"island {index} is there, with {len(island.addresses)} ranks")
        return island, rank

    def _check_job(self, index: int, job: Message) -> None:
        """Refuse the job of an island if another island has another value; RefusedError: it does."""
        for other in self._islands.values():
            for key, value in other.job.items():
                if other.index != index and job.get(key) != value:
                    found = printable(f"{job.get(key)}, and {value} on island {other.index}", _MOST_SAID)
                    self._say(f"island {index} is refused: {printable(key, _MOST_SAID)} is {found}")
                    what = f"island {other.index} has another value, and all must have the same"
                    # Who has proven nothing learns nothing of the others: the server's own lines have it.
                    allowed = {"allowed": value} if self._secret else {}
                    raise RefusedError(refused=what, key=key, found=job.get(key), **allowed)

    def _make_coordinator(self, job: Message) -> Coordinator:
        """Make the coordinator of a job, and give it the shards that it needs; RefusedError: there are too few."""
        if not _is_of_parameter_server(job):
            return Rendezvous(job, self._shown)
        wanted = job.integer("islands.server_shards", least=1, most=_MOST_PLACES, default=1) - 1
        if wanted > len(self._free_shards):
            what = f"the server has {1 + len(self._free_shards)} of the shards of this job"
            # Others may be on their way.
            raise RefusedError(refused=what, key="islands.server_shards", found=1 + wanted, may_pass=True)
        links = self._free_shards[:wanted]
        made: Coordinator = importlib.import_module(_PARAMETER_SERVER).ParameterServer(job, self._shown, links)
        self._free_shards, self._shards = self._free_shards[wanted:], links
        return made

    def _end(self, island: Island, why: str) -> None:
        """Tell an island why it takes part no more, and lose it."""
        # Cut to what a rank reads in one line: it would not learn the reason of a longer one.
        island.tell({"ended": printable(why, _MOST_WHY)})
        self._lose(island, why)

    def _lose(self, island: Island, why: str) -> None:
        """Close the connections of an island, and go on without it; with the last island the job ends."""
        if self._islands.get(island.index) is not island:
            return
        del self._islands[island.index]
        for connection in island.connections.values():
            connection.writer.close()
        self._say(f"island {island.index} has left: {why}")
        if self._coordinator is not None:
            self._coordinator.lose(island.index)
            if not any(other.job for other in self._islands.values()):
                # The rank 0 of those that are left may bring another job, and their ranks know the nonce of this one.
                for other in list(self._islands.values()):
                    self._lose(other, "the job before it has ended: it connects anew")
        if not self._islands:
            # The next job counts exchanges anew: with another nonce, what is still under way cannot pass for its own.
            self._coordinator, self._nonce = None, secrets.token_hex(16)
            for link in self._shards:
                # The shard connects anew, with nothing of this job.
                link.connection.writer.close()
            self._shards = []


def _has_parameter_server(hello: Message) -> bool:
    return "job" in hello and _is_of_parameter_server(hello.mapping("job"))


def _is_of_parameter_server(job: Message) -> bool:
    return job.get("islands.method") == IslandMethod.parameter_server.value


def _check_parameter_server(job: Message) -> None:
    """Refuse a job whose optimizer no parameter server can step; RefusedError: it is one."""
    try:
        importlib.import_module(_PARAMETER_SHARD).check_job(job)
    except ConfigError as error:
        refused = f"the server cannot serve this: {error.what}"
        raise RefusedError(refused=refused, key=error.where, found=f"{error.found}") from error
    except Exception as error:
        # An optimizer may raise anything at settings that come from another machine.
        refused = f"the server cannot make this optimizer: {first_line(error)}"
        raise RefusedError(refused=printable(refused, _MOST_SAID), key="optimizer") from error


def _read_addresses(hello: Message, *, are_used: bool) -> list[str]:
    """Give the address of each rank of an island; RefusedError: they are none that others could use.

    A parameter server's islands do not use addresses: their number alone counts.
    """
    found = hello.list("addresses")
    if are_used:
        for address in found:
            _check_address(address, "addresses")
    if not 0 < len(found) <= _MOST_PLACES:
        raise RefusedError(refused="an island has an address for each rank", key="addresses", found=len(found))
    return found


def _check_address(address: object, key: str) -> None:
    """Refuse what is no address; RefusedError: it is none."""
    matched = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if matched is None or not 0 < int(matched["port"]) < 2**16:
        what, allowed = "an address of a rank is none", "tcp://HOST:PORT"
        raise RefusedError(refused=what, key=key, found=printable(f"{address}", _MOST_SAID), allowed=allowed)
