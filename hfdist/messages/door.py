"""Who may speak at a socket: who proves to know a secret, which nobody tells, and says in time who it is.

    who comes                              who listens
    hello, nonce            ->
                            <-             challenge, proof       of the secret, over both numbers
    proof, and more of hello ->                                   only to who has proven it, too

Without a secret the hello is all. The proof is HMAC-SHA256. What follows is neither signed nor encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import BinaryIO

from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, RefusedError, read_message, write_message

SECRET = "HFDIST_ISLANDS_SECRET"
"""The variable with what islands and their server know, or a run and its generators, where strangers can reach them."""
HELLO_SECONDS = 20.0
"""Seconds in which a connection must have said who it is."""
MOST_STRANGERS = 256
"""Connections that have not said who they are. If one more comes, the oldest is dropped."""
_NOTE_SECONDS = 10.0
_STRANGER_BYTES = 4096
"""Most bytes of a line from a connection that has not proven yet that it knows the secret."""
_HELLO_BYTES = 2**20
_CHUNK_BYTES = 2**16


def prove(secret: str, side: str, *numbers: str) -> str:
    """Give what only who knows the secret can say of these numbers."""
    return hmac.new(secret.encode(), "|".join((side, *numbers)).encode(), "sha256").hexdigest()


def _is_proof(found: str, secret: str, side: str, *numbers: str) -> bool:
    return hmac.compare_digest(found.encode(), prove(secret, side, *numbers).encode())


class Door:
    """Serves a listening socket.

    Args:
        secret: what all know who may come in; empty: anybody may.
        hear: speaks with one that has come in, whose hello it gets. Once it returns, the connection ends. RefusedError:
            what the other one is told.
        note: takes a line on a connection that was dropped, once in a while.
        most_strangers: see MOST_STRANGERS.
    """

    def __init__(
        self,
        secret: str,
        hear: Callable[[Message, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        note: Callable[[str], None] = lambda line: None,
        most_strangers: int = MOST_STRANGERS,
    ) -> None:
        self.secret, self._hear, self._note, self._most_strangers = secret, hear, note, most_strangers
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not said who they are, the oldest first."""
        self._notes_from = 0.0
        """Time of the clock from which refusals are noted again: strangers must not fill a log."""

    async def open(self, listener: socket.socket) -> asyncio.Server:
        """Begin to serve."""
        return await asyncio.start_server(self._meet, sock=listener, limit=_CHUNK_BYTES, backlog=self._most_strangers)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                try:
                    # Not `wait_for`: of Python 3.11 it loses the end of this door that comes with the last of a hello.
                    async with asyncio.timeout(HELLO_SECONDS):
                        hello = await self._admit(reader, writer)
                    self._strangers.pop(writer, None)
                    await self._hear(hello, reader, writer)
                except RefusedError as error:
                    writer.write(write_message(error.answer))
                    await asyncio.wait_for(writer.drain(), HELLO_SECONDS)
                except NotAMessageError as error:
                    if time.monotonic() >= self._notes_from:
                        self._notes_from = time.monotonic() + _NOTE_SECONDS
                        self._note(f"a connection is dropped: {error}")
        finally:
            self._strangers.pop(writer, None)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message:
        secret, what = self.secret, None
        hello = read_message(await read_line(reader, _STRANGER_BYTES if secret else _HELLO_BYTES), _HELLO_BYTES)
        if bool(secret) is not ("nonce" in hello):
            what = "this server asks for the secret" if secret else "this server has no secret, and you have one"
            raise RefusedError(refused=what, key=SECRET)
        if not secret:
            return hello
        own, theirs = secrets.token_hex(16), hello.text("nonce", most=64)
        writer.write(write_message({"challenge": own, "proof": prove(secret, "server", theirs, own)}))
        answer = read_message(await read_line(reader, _HELLO_BYTES), _HELLO_BYTES)
        if not _is_proof(answer.text("proof"), secret, "client", theirs, own):
            raise RefusedError(refused="this server knows another secret", key=SECRET)
        return Message({**hello, **answer})


class DoorThread:
    """A door that is served by a thread of its own, until `close`.

    Args:
        door: what is served.
        listener: a listening socket.
        name: the thread's name.
    """

    def __init__(self, door: Door, listener: socket.socket, name: str) -> None:
        self._door, self._listener = door, listener
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await self._door.open(self._listener)
        await self._closed.wait()
        server.close()


async def read_line(reader: asyncio.StreamReader, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a line of so many bytes at most; EOFError: the connection has ended before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            line += await reader.readexactly(error.consumed)
        if len(line) > most_bytes:
            raise NotAMessageError(f"a line is longer than {most_bytes} bytes")
    return bytes(line)


async def read_bytes(reader: asyncio.StreamReader, num_bytes: int, heard: Callable[[], None]) -> bytes:
    """Read what follows a message; `heard` is called as it comes."""
    found = bytearray()
    while len(found) < num_bytes:
        chunk = await reader.read(min(num_bytes - len(found), MOST_BYTES))
        if not chunk:
            raise EOFError
        found += chunk
        heard()
    return bytes(found)


def knock(
    address: tuple[str, int],
    secret: str,
    hello: Mapping[str, object],
    more: Mapping[str, object],
    timeout_seconds: float,
) -> tuple[socket.socket, BinaryIO]:
    """Connect to a door, and say who one is.

    Args:
        address: host and port.
        secret: what the door asks for; empty: nothing.
        hello: what whoever listens there may know.
        more: what only one may know who has proven to know the secret.
        timeout_seconds: the longest wait for the connection, and for each answer.

    Returns:
        The connection, and what it is read by.

    Raises:
        OSError: nobody answers.
        NotAMessageError: what answers is no door.
        RefusedError: it does not let this one in, or does not know the secret.
    """
    try:
        made = socket.create_connection(address, timeout=timeout_seconds)
    except UnicodeError as error:
        raise OSError(f"no host can have the name {address[0]}") from error
    try:
        answers = made.makefile("rb")
        if not secret:
            made.sendall(write_message({**hello, **more}))
            return made, answers
        own = secrets.token_hex(16)
        made.sendall(write_message({**hello, "nonce": own}))
        challenge = hear_answer(answers)
        theirs = challenge.text("challenge", most=64)
        if not _is_proof(challenge.text("proof"), secret, "server", own, theirs):
            raise RefusedError(refused="the server does not know the secret", key=SECRET)
        made.sendall(write_message({**more, "proof": prove(secret, "client", own, theirs)}))
        return made, answers
    except BaseException:
        made.close()
        raise


def hear_answer(answers: BinaryIO) -> Message:
    """Read a message of whoever listens.

    Raises:
        ConnectionError: it has ended the connection.
        NotAMessageError: what it says is no message.
        RefusedError: it does not let this one in.
    """
    line = answers.readline(MOST_BYTES)
    if not line:
        raise ConnectionResetError("the connection was ended")
    if not line.endswith(b"\n"):
        raise NotAMessageError("a line does not end")
    message = read_message(line)
    if "refused" in message:
        raise RefusedError(**message)
    return message
