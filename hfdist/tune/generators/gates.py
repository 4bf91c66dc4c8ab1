"""The gates of rank 0, through which generators and ranks of other machines reach the broker as its own peers.

    hfdist generate  --- TCP, secret of people --->  GeneratorGate  --+
    its reader of files  ---------------------------------^           |--- a socket each --->  the broker
    a rank of another machine  --- TCP, secret of this start --->  RankGate  --+

What is said goes through as it is: the broker does not know who is on which machine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import zmq

from hfdist.errors import printable
from hfdist.messages.door import Door, DoorThread, read_line
from hfdist.messages.message import MOST_BYTES as MOST_BYTES_OF_LINE
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message, write_message
from hfdist.tune.generators.link import notice_loss
from hfdist.tune.generators.messages import DROPPED, MOST_BYTES, RANK, pack
from hfdist.tune.generators.served_files import ServedFiles
from hfdist.tune.generators.sockets import connect_in_loop
from hfdist.version import __version__

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_CONNECTIONS = 256
"""Connections of generators and of their readers of files; one more is refused."""
_LINGER_MILLISECONDS = 1000
"""The longest time for which a closed socket still sends what it holds."""
_MOST_SAID = 200
"""The most characters that are logged of what a generator says of itself."""
_ASK_BYTES = 2**16
"""The most bytes of a question for files."""


class RankGate:
    """Lets ranks of other machines in.

    Args:
        listener: a listening socket.
        folder: folder of the broker's socket.
    """

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self._folder = folder
        self.secret = secrets.token_hex(16)
        """Secret of the ranks of this start; they are told it through their process group."""
        self._served = DoorThread(Door(self.secret, self._hear, logger.warning), listener, "generators-ranks")

    def close(self) -> None:
        """Serve no more."""
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be a rank for the broker: pass messages both ways at once, until the connection ends."""

        async def pass_in() -> None:
            while True:
                line = await read_line(reader, MOST_BYTES)
                await peer.send(_without_end(line))

        async def pass_out() -> None:
            while True:
                await _write(writer, await peer.recv())

        peer = connect_in_loop(self._folder, f"{RANK}{hello.integer('rank')}")
        try:
            writer.write(write_message({"welcome": 1}))
            await _first(pass_in(), pass_out())
        finally:
            peer.close(_LINGER_MILLISECONDS)


class GeneratorGate:
    """Lets generators of other machines in, and gives them the files that they ask for.

    Args:
        listener: a listening socket.
        folder: folder of the broker's socket.
        secret: secret that generators must know; "": anybody may come in who reaches the listener.
        welcome: message that tells a generator of the run; `start` in it names this start of the run.
        files: files that a generator may ask for.
        most_bytes: the most bytes of a message of answers.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        *,
        secret: str,
        welcome: Mapping[str, object],
        files: ServedFiles,
        most_bytes: int,
    ) -> None:
        self._folder, self._welcome, self._files, self._most_bytes = folder, welcome, files, most_bytes
        self._num_connections, self._num_generators = 0, 0
        self._told: set[str] = set()
        """Refusals that are in the log."""
        self._is_closing = False
        self._last_words = b""
        """Line that each generator gets when the gate closes."""
        self._served = DoorThread(Door(secret, self._hear, logger.warning), listener, "generators-gate")

    def close(self, *, is_end: bool) -> None:
        """Serve no more; `is_end`: generators are told that the training has ended, and do not wait for its return."""
        self._is_closing = True
        if is_end:
            self._last_words = write_message({"ended": 1})
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A socket of both families writes an address of IPv4 with a prefix.
        host = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
        found, kind = hello.text("hfdist"), hello.text("is")
        if found != __version__:
            self._tell_once(f"a generator of {host} has hfdist {printable(found, _MOST_SAID)}, not {__version__}")
            what = "a generator must have the run's version of hfdist"
            raise RefusedError(refused=what, key="hfdist", found=found, allowed=__version__)
        if self._num_connections == MOST_CONNECTIONS:
            raise RefusedError(refused=f"this run has {MOST_CONNECTIONS} connections of generators already")
        notice_loss(writer.get_extra_info("socket"))
        self._num_connections += 1
        try:
            if kind == "generator":
                await self._pass_on(host, reader, writer)
            elif kind == "files":
                await self._give_files(host, reader, writer)
            else:
                raise NotAMessageError("nobody comes in as that")
        finally:
            self._num_connections -= 1

    def _tell_once(self, refusal: str) -> None:
        """Log a refusal, unless it is in the log: a generator that is refused may come again and again."""
        if refusal not in self._told and len(self._told) < MOST_CONNECTIONS:
            self._told.add(refusal)
            logger.warning("refused: %s", refusal)

    async def _pass_on(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be a generator for the broker: it speaks, gets prompts, and speaks again."""
        self._num_generators += 1
        name = f"generator {self._num_generators} of {host}"
        peer = connect_in_loop(self._folder, name)
        said = asyncio.ensure_future(read_line(reader, self._most_bytes))
        try:
            await _write(writer, _without_end(write_message(self._welcome)))
            logger.info("%s has joined", name)
            while True:
                await peer.send(_without_end(await said))
                said = asyncio.ensure_future(read_line(reader, self._most_bytes))
                # A generator that speaks while it should wait is dropped: nothing would read what it says.
                prompts = await _unless(said, peer.recv())
                if prompts == DROPPED:
                    return
                await _write(writer, prompts)
        except NotAMessageError as error:
            logger.warning("%s is not heard any more: %s", name, error)
        finally:
            said.cancel()
            if self._is_closing:
                writer.write(self._last_words)
            else:
                peer.send(pack({"kind": "gone"}), zmq.NOBLOCK)
            peer.close(_LINGER_MILLISECONDS)

    async def _give_files(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer questions for files, each with one message, and with a chunk after it where one is asked for."""
        await _write(writer, pack({"welcome": 1}))
        while True:
            asked = read_message(await read_line(reader, _ASK_BYTES))
            if "differs" in asked:
                self._tell_once(f"a generator of {host} has {printable(asked.text('differs'), _MOST_SAID)}")
                return
            try:
                if asked.text("start") != self._welcome["start"]:
                    # Of a start of the run that has ended.
                    raise FileNotFoundError
                if "file" in asked:
                    await self._give_chunk(asked, writer)
                else:
                    await self._give_listing(asked, writer)
            except FileNotFoundError:
                await _write(writer, pack({"gone": 1}))

    async def _give_listing(self, asked: Message, writer: asyncio.StreamWriter) -> None:
        # In a thread: the first listing reads whole files.
        listing = write_message({"files": await asyncio.to_thread(self._files.list, asked)})
        if len(listing) > MOST_BYTES_OF_LINE:
            raise RefusedError(refused="this model has too many files to send", key="model.name")
        await _write(writer, _without_end(listing))

    async def _give_chunk(self, asked: Message, writer: asyncio.StreamWriter) -> None:
        chunk = self._files.find(asked)
        with chunk.path.open("rb") as file:
            await _write(writer, pack({"bytes": chunk.num_bytes}))
            await asyncio.get_running_loop().sendfile(writer.transport, file, chunk.first, chunk.num_bytes)


def _without_end(line: bytes) -> bytes:
    """Give the message of a line: the broker's messages have no line end."""
    return line[:-1]


async def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Write a message as a line, and wait until most of it is under way."""
    writer.write(message + b"\n")
    await writer.drain()


async def _first(*waits: Awaitable[None]) -> None:
    """Wait for the first of several, which ends with an error; end the others."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _unless(said: asyncio.Future[bytes], wanted: Awaitable[T]) -> T:
    """Wait for something that comes before the other side speaks.

    Raises:
        EOFError, OSError: the other side has ended.
        NotAMessageError: the other side has spoken.
    """
    task = asyncio.ensure_future(wanted)
    both: list[asyncio.Future[Any]] = [said, task]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            said.result()
            raise NotAMessageError("it speaks without being asked")
        return task.result()
    finally:
        task.cancel()
