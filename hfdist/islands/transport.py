"""What travels between the ranks of islands: the mean of a vector, and whole states, over connections of their own.

Each rank speaks to the ranks of the same number in other islands. Of a vector of n islands each adds up one n-th in
float32 and gives the mean to the others, so that all have the same bits, and a rank sends 2 (n - 1) / n of the vector.
Any wait ends as soon as the rendezvous is aborted: a collective of torch would wait for its own time-out. What a member
has sent is looked at as it comes: one bad part, or none, names its island.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import queue
import secrets
import socket
import termios
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from hfdist.config.islands import Codec
from hfdist.islands.codec import decode, encode
from hfdist.islands.vectors import is_finite
from hfdist.launch.address import listen
from hfdist.messages.door import Door, DoorThread, knock, read_bytes, read_line
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message, write_message

_CHUNK_ELEMENTS = 2**24
"""Elements of a vector that travel at a time."""
MOST_PART_BYTES = 4 * _CHUNK_ELEMENTS
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.2
_LINGER_SECONDS = 5.0
"""Seconds without progress after which what is under way is given up when a rank ends."""
_SENT_BYTES = 2**18
"""Bytes after which progress is seen."""
_CONNECT_SECONDS = 10.0
_MOST_WAITING = 8
"""Messages of one rank that have come before they were asked for: it cannot be further ahead."""
_SENDER = "address"

_Key = tuple[int, str, str]
"""Rendezvous, kind, and sender of what has come."""


class AbortedError(Exception):
    """The rendezvous does not count."""


class BadPartError(Exception):
    """What a member has sent cannot be used.

    Args:
        address: of the member.
        why: for people.
    """

    def __init__(self, address: str, why: str) -> None:
        super().__init__(why)
        self.address = address


class Transport:
    """The connections of one rank.

    Args:
        host: the own address, as other islands reach it.
        port: at which this rank hears others; 0: a free one.
        codec: how vectors travel.
        most_bytes: of one message.
        silent_seconds: after which a part is missed of which nothing comes.
        wait_seconds: for which the port is tried.

    Raises:
        OSError: the port is taken, or the host is no address of this machine.
        OverflowError: no port has this number.
    """

    def __init__(
        self,
        host: str,
        codec: Codec,
        *,
        port: int = 0,
        most_bytes: int = MOST_PART_BYTES,
        silent_seconds: float = 60.0,
        wait_seconds: float = 0.0,
    ) -> None:
        self._codec, self._most_bytes, self._silent_seconds = codec, most_bytes, silent_seconds
        self._nonce = ""
        """Nonce of the server and of its islands: who does not know it is none of them."""
        self._news = threading.Condition()
        self._waiting: dict[_Key, list[bytes]] = {}
        """Messages that have come before they were asked for."""
        self._heard: dict[str, float] = {}
        """Time on the clock at which something has come last, by sender."""
        self._oldest = 0
        """Number of the oldest rendezvous whose messages are still taken."""
        # Until it is told which server's islands may speak to it, none may.
        self._door = Door(secrets.token_hex(16), self._hear)
        listener = listen(host, port, wait_seconds=wait_seconds)
        self._served = DoorThread(self._door, listener, "islands-inbox")
        in_url = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{in_url}:{self._served.port}"
        """Address of this rank for other islands."""
        self._peers: dict[str, _Sender] = {}
        self.sent_bytes = 0

    def mean(
        self, number: int, vector: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        """Give the mean of all members' vectors, the same on all.

        Args:
            number: of the rendezvous.
            vector: float32 on the CPU, of shape [n], as long on each member.
            members: the addresses of the ranks that take part, in the same order on all; this one is among them.
            is_aborted: whether to wait no more.

        Raises:
            AbortedError: the rendezvous has been aborted.
            BadPartError: a member's part is of another length, is not finite, or does not come.
        """
        means = [
            self._mean_of_chunk(number, f"{place}", chunk, members, is_aborted)
            for place, chunk in enumerate(vector.split(_CHUNK_ELEMENTS))
        ]
        return torch.cat(means) if means else vector

    def _mean_of_chunk(
        self, number: int, name: str, chunk: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        own, parts = members.index(self.address), torch.tensor_split(chunk, len(members))
        encoded = [encode(self._codec, part.contiguous()) for part in parts]
        sizes = [len(parts[own])] * len(members)
        swapped = self._swap(number, f"part {name}", members, encoded, sizes, is_aborted)
        total = torch.zeros_like(parts[own])
        # Parts are added in the members' order, each rounded alike, so that it does not matter who adds.
        for part in swapped:
            total += part
        if not is_finite(total):
            sizes_of_parts = [float(part.abs().max()) for part in swapped]
            largest = members[sizes_of_parts.index(max(sizes_of_parts))]
            raise BadPartError(largest, "its numbers are too large to add up")
        own_mean = encode(self._codec, total / len(members))
        sizes = [len(part) for part in parts]
        return torch.cat(self._swap(number, f"mean {name}", members, [own_mean] * len(members), sizes, is_aborted))

    def _swap(
        self,
        number: int,
        kind: str,
        members: Sequence[str],
        contents: list[bytes],
        sizes: Sequence[int],
        is_aborted: Callable[[], bool],
    ) -> list[torch.Tensor]:
        """Give each member its content, and take from each one that has so many numbers."""
        for address, content in zip(members, contents, strict=True):
            if address != self.address:
                self.send(address, number, kind, content)
        # Who waits for a part of another cannot give its mean: the other one is to be named first.
        patience = self._silent_seconds * (1 if kind.startswith("part") else 2)
        found = []
        for address, content, size in zip(members, contents, sizes, strict=True):
            if address != self.address:
                content = b"".join(self.receive(address, number, kind, is_aborted, patience))
            try:
                values = decode(self._codec, content, size)
            except ValueError as error:
                raise BadPartError(address, str(error)) from error
            if not is_finite(values):
                raise BadPartError(address, "its numbers are not finite")
            found.append(values)
        return found

    def send(self, address: str, number: int, kind: str, *contents: bytes) -> None:
        """Begin to send; it goes on beside what follows."""
        if address not in self._peers:
            self._peers[address] = _Sender(address, self._nonce, self.address)
        self._peers[address].put(number, kind, contents)
        self.sent_bytes += sum(map(len, contents))

    def receive(
        self, address: str, number: int, kind: str, is_aborted: Callable[[], bool], patience_seconds: float = math.inf
    ) -> list[bytes]:
        """Wait for what a member has sent.

        Raises:
            AbortedError: the rendezvous has been aborted.
            BadPartError: nothing has come for so long.
        """
        begin, key = time.monotonic(), (number, kind, address)
        with self._news:
            while key not in self._waiting:
                if is_aborted():
                    raise AbortedError
                silent = time.monotonic() - max(begin, self._heard.get(address, begin))
                if silent > patience_seconds:
                    raise BadPartError(address, f"nothing has come for {silent:.0f} s")
                self._news.wait(_POLL_SECONDS)
            return self._waiting.pop(key)

    def begin(self, nonce: str) -> None:
        """Speak to those who know this server."""
        if nonce != self._nonce:
            with self._news:
                self._nonce, self._waiting, self._oldest = nonce, {}, 0
            self._door.secret = nonce
            self.keep(())

    def keep(self, addresses: Sequence[str]) -> None:
        """Drop what is still under way to ranks that are gone."""
        for address in [one for one in self._peers if one not in addresses]:
            self._peers.pop(address).close()

    def forget(self, number: int) -> None:
        """Drop what has come of rendezvous up to this one."""
        with self._news:
            self._oldest = number + 1
            self._waiting = {key: contents for key, contents in self._waiting.items() if key[0] > number}

    def close(self) -> None:
        """Close all, once what is under way has arrived or none of it gets on."""
        peers, most, silent_seconds = list(self._peers.values()), -math.inf, 0.0
        for peer in peers:
            peer.finish()
        # Waits are counted, not the clock: where all processes stand still for a while, nobody could have got on.
        while silent_seconds < _LINGER_SECONDS and not all(peer.has_ended(_POLL_SECONDS) for peer in peers):
            gone = sum(peer.gone_bytes() for peer in peers)
            # What is sent anew gets on only where it had not been.
            silent_seconds = 0.0 if gone > most else silent_seconds + _POLL_SECONDS
            most = max(gone, most)
        for peer in peers:
            peer.close()
        self._peers = {}
        self._served.close()

    async def _hear(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what a rank of another island sends, in the thread of the door."""
        nonce, sender = self._nonce, hello.text(_SENDER)

        def heard() -> None:
            self._heard[sender] = time.monotonic()

        while True:
            message = read_message(await read_line(reader))
            number, kind, sizes = message.integer("rendezvous"), message.text("kind"), message.integers("sizes")
            if sum(sizes) > self._most_bytes:
                raise NotAMessageError(f"more than {self._most_bytes} bytes would follow")
            contents = [await read_bytes(reader, size, heard) for size in sizes]
            with self._news:
                if nonce != self._nonce or sum(key[2] == sender for key in self._waiting) >= _MOST_WAITING:
                    raise NotAMessageError("nobody waits for it")
                heard()
                if number >= self._oldest:
                    self._waiting[number, kind, sender] = contents
                    self._news.notify_all()


class _Sender:
    """A thread that sends messages to one rank, each again and again until it has arrived.

    Args:
        address: of the rank, as tcp://HOST:PORT.
        secret: of its door.
        own: address.
    """

    def __init__(self, address: str, secret: str, own: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._address, self._secret, self._own = (host.strip("[]"), int(port)), secret, own
        self._queue: queue.Queue[tuple[bytes, Sequence[bytes]] | None] = queue.Queue()
        self._is_closed = threading.Event()
        self._connection: socket.socket | None = None
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="islands-sender", daemon=True)
        self._thread.start()

    def put(self, number: int, kind: str, contents: Sequence[bytes]) -> None:
        """Begin to send."""
        header = {"rendezvous": number, "kind": kind, "sizes": [len(content) for content in contents]}
        self._queue.put((write_message(header), contents))

    def finish(self) -> None:
        """End once all has arrived. Does not wait for it."""
        self._queue.put(None)

    def has_ended(self, wait_seconds: float) -> bool:
        """Whether it has, after so many seconds at most."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def gone_bytes(self) -> int:
        """Count what has left this machine: a slow network takes long for what the kernel holds.

        Where the kernel does not say what it holds, that is counted, too.
        """
        held, connection = array("i", [0]), self._connection
        if connection is not None:
            with suppress(OSError, ValueError):  # the kernel does not say it; the connection has ended
                fcntl.ioctl(connection, termios.TIOCOUTQ, held)
        return self._sent_bytes - held[0]

    def close(self) -> None:
        """End, whatever is still under way."""
        self._queue.put(None)
        self._is_closed.set()
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # ended before
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None and not self._is_closed.is_set():
            while not self._is_closed.is_set() and not self._is_sent(*message):
                self._is_closed.wait(_RETRY_SECONDS)
        if self._connection is not None:
            with suppress(OSError):  # ended by the other side, or by `close`
                # That one ends the connection once it has read all.
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.recv(1)
            self._connection.close()

    def _is_sent(self, header: bytes, contents: Sequence[bytes]) -> bool:
        before = self._sent_bytes
        try:
            if self._connection is None:
                self._connection, _ = knock(self._address, self._secret, {_SENDER: self._own}, {}, _CONNECT_SECONDS)
                # How long a slow network takes is for who waits to judge.
                self._connection.settimeout(None)
            self._connection.sendall(header)
            for content in contents:
                for start in range(0, len(content), _SENT_BYTES):
                    self._connection.sendall(memoryview(content)[start : start + _SENT_BYTES])
                    self._sent_bytes += _SENT_BYTES
        except (OSError, NotAMessageError, RefusedError):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._sent_bytes = before
            return False
        return True
