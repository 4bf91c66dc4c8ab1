"""What travels between the ranks of islands: the mean of a vector, and whole states, over connections of their own.

Each rank speaks to the ranks of the same number in other islands. Each adds up one part of the vector in float32, and
gives its mean to the others, so that all have the same bits:

    3 islands      parts of the vector      each sends part i to island i      island i sends its mean to all
    A              a0 a1 a2                 a1 to B, a2 to C                    (a0 + b0 + c0) / 3
    B              b0 b1 b2                 b0 to A, b2 to C                    (a1 + b1 + c1) / 3
    C              c0 c1 c2                 c0 to A, c1 to B                    (a2 + b2 + c2) / 3

With n islands a rank sends 2 (n - 1) / n of the vector. Any wait ends as soon as the rendezvous is aborted: a
collective of torch would wait for its own time-out. Each part is checked when it comes, so that a bad or missing one
names its island.
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
from typing import NamedTuple

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
"""The most bytes of one part of a vector: float32 numbers of a whole chunk."""
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.2
_LINGER_SECONDS = 5.0
"""Seconds without progress after which what is under way is given up when a rank ends."""
_SLICE_BYTES = 2**18
"""Bytes that are handed to the kernel at once; progress is counted in these."""
_CONNECT_SECONDS = 10.0
_MOST_WAITING = 8
"""The most messages of one rank that wait until they are asked for: no rank of an island is further ahead."""
_SENDER = "address"
"""Member of a hello: the address of the rank that connects."""


class _Key(NamedTuple):
    """The name of a message."""

    rendezvous: int
    kind: str
    """What the message has, such as `part 0`: a rank sends one message of a kind in a rendezvous."""
    sender: str
    """Address of the rank that has sent it."""


class AbortedError(Exception):
    """The rendezvous is aborted, so that nothing of it counts."""


class BadPartError(Exception):
    """What a member of a rendezvous has sent, or has not sent, cannot be used.

    Args:
        address: address of the member's rank.
        why: the reason, for people.
    """

    def __init__(self, address: str, why: str) -> None:
        super().__init__(why)
        self.address = address


class Transport:
    """The connections of one rank to the ranks of other islands.

    Args:
        host: the address of this machine at which other islands reach this rank.
        codec: how the numbers of vectors travel.
        port: the port at which this rank hears others; 0: a free one.
        most_bytes: the most bytes of one message.
        silent_seconds: seconds without a byte from a member after which its part counts as missing.
        wait_seconds: seconds for which a port that is taken is tried.

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
        """Text that only the server and its islands know; others may not connect."""
        self._news = threading.Condition()
        self._waiting: dict[_Key, list[bytes]] = {}
        """Contents of the messages that have come and were not asked for yet."""
        self._heard: dict[str, float] = {}
        """Time on the monotonic clock at which something has come last, by sender."""
        self._oldest = 0
        """Number of the oldest rendezvous whose messages are still taken."""
        # Nobody knows this secret: nobody may connect before `begin` has set that of a server.
        self._door = Door(secrets.token_hex(16), self._hear)
        listener = listen(host, port, wait_seconds=wait_seconds)
        self._served = DoorThread(self._door, listener, "islands-inbox")
        in_url = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{in_url}:{self._served.port}"
        """Address of this rank for other islands."""
        self._peers: dict[str, _Sender] = {}
        """The connections on which this rank sends, by address."""
        self.sent_bytes = 0
        """Bytes of contents that this rank has begun to send so far."""

    def mean(
        self, number: int, vector: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        """Give the mean of all members' vectors, the same on all.

        Args:
            number: number of the rendezvous.
            vector: float32 numbers on the CPU, of the same shape [n] on each member.
            members: addresses of the ranks that take part, in the same order on all; that of this rank is among them.
            is_aborted: says whether the rendezvous is aborted.

        Returns:
            Float32 numbers on the CPU, of shape [n].

        Raises:
            AbortedError: the rendezvous has been aborted.
            BadPartError: a member's part is of another length, is not finite, or does not come.
        """
        means = [
            self._mean_of_chunk(number, place, chunk, members, is_aborted)
            for place, chunk in enumerate(vector.split(_CHUNK_ELEMENTS))
        ]
        return torch.cat(means) if means else vector

    def _mean_of_chunk(
        self, number: int, place: int, chunk: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        """Give the mean of a chunk: add up the own part of all members, and get the means of the other parts."""
        parts = torch.tensor_split(chunk, len(members))
        own_part = parts[members.index(self.address)]
        encoded = [encode(self._codec, part.contiguous()) for part in parts]
        sizes = [len(own_part)] * len(members)
        summands = self._swap(number, f"part {place}", members, encoded, sizes, is_aborted)
        total = torch.zeros_like(own_part)
        # In the members' order, and each rounded alike, so that it does not matter who adds up.
        for summand in summands:
            total += summand
        if not is_finite(total):
            magnitudes = {address: float(part.abs().max()) for address, part in zip(members, summands, strict=True)}
            raise BadPartError(max(magnitudes, key=magnitudes.__getitem__), "its numbers are too large to add up")
        own_mean = encode(self._codec, total / len(members))
        sizes = [len(part) for part in parts]
        return torch.cat(self._swap(number, f"mean {place}", members, [own_mean] * len(members), sizes, is_aborted))

    def _swap(
        self,
        number: int,
        kind: str,
        members: Sequence[str],
        contents: list[bytes],
        sizes: Sequence[int],
        is_aborted: Callable[[], bool],
    ) -> list[torch.Tensor]:
        """Send each member its content, and take one of each member, whose numbers are decoded: `sizes` of them."""
        for address, content in zip(members, contents, strict=True):
            if address != self.address:
                self.send(address, number, kind, content)
        patience = self._silent_seconds
        if kind.startswith("mean"):
            # A member that waits for another's part cannot give its mean: that other one is to be named first.
            patience *= 2
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
        """Begin to send a message to a rank; a thread goes on with it.

        Args:
            address: address of the rank.
            number: number of the rendezvous.
            kind: what the message has: one message of a kind goes to a rank in a rendezvous.
            contents: the bytes of the message, in parts that `receive` gives as a list.
        """
        if address not in self._peers:
            self._peers[address] = _Sender(address, self._nonce, self.address)
        self._peers[address].put(number, kind, contents)
        self.sent_bytes += sum(map(len, contents))

    def receive(
        self, address: str, number: int, kind: str, is_aborted: Callable[[], bool], patience_seconds: float = math.inf
    ) -> list[bytes]:
        """Wait for a message of a member, and give its contents.

        Args:
            address: address of the member's rank.
            number: number of the rendezvous.
            kind: the kind with which the member sends it.
            is_aborted: says whether the rendezvous is aborted.
            patience_seconds: seconds without a byte from the member after which this gives up.

        Raises:
            AbortedError: the rendezvous has been aborted.
            BadPartError: nothing has come for so long.
        """
        begin, key = time.monotonic(), _Key(number, kind, address)
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
        """Let the islands of a server connect, which know its nonce; what came from those of another is dropped."""
        if nonce != self._nonce:
            with self._news:
                self._nonce, self._waiting, self._oldest = nonce, {}, 0
            self._door.secret = nonce
            self.keep(())

    def keep(self, addresses: Sequence[str]) -> None:
        """Close the connections to all ranks but these, whatever is still under way."""
        for address in [one for one in self._peers if one not in addresses]:
            self._peers.pop(address).close()

    def forget(self, number: int) -> None:
        """Drop the messages of the rendezvous with this number and of all earlier ones."""
        with self._news:
            self._oldest = number + 1
            self._waiting = {key: contents for key, contents in self._waiting.items() if key.rendezvous > number}

    def close(self) -> None:
        """Close all connections, once what is under way has arrived or makes no progress any more."""
        peers = list(self._peers.values())
        for peer in peers:
            peer.finish()
        most_gone, stuck_seconds = -math.inf, 0.0
        # Waits are counted, not the clock: where all processes stand still for a while, nobody could make progress.
        while stuck_seconds < _LINGER_SECONDS and not all(peer.has_ended(_POLL_SECONDS) for peer in peers):
            # The most so far: a message that is sent anew makes progress only beyond its earlier try.
            gone = sum(peer.gone_bytes() for peer in peers)
            if gone > most_gone:
                most_gone, stuck_seconds = gone, 0.0
            else:
                stuck_seconds += _POLL_SECONDS
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
                num_waiting = sum(key.sender == sender for key in self._waiting)
                if nonce != self._nonce or num_waiting >= _MOST_WAITING:
                    raise NotAMessageError("nobody waits for it")
                heard()
                if number >= self._oldest:
                    self._waiting[_Key(number, kind, sender)] = contents
                    self._news.notify_all()


class _Parcel(NamedTuple):
    """A message as it is sent."""

    header: bytes
    contents: Sequence[bytes]


class _Sender:
    """A thread that sends messages to one rank, each again and again until it has arrived.

    Args:
        address: address of the rank, as tcp://HOST:PORT.
        secret: the secret that the rank's door asks for.
        own_address: address of this rank, by which the other one knows it.
    """

    def __init__(self, address: str, secret: str, own_address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._address, self._secret, self._own_address = (host.strip("[]"), int(port)), secret, own_address
        self._queue: queue.Queue[_Parcel | None] = queue.Queue()
        """Messages to send, in order; None: the thread ends."""
        self._is_closed = threading.Event()
        self._connection: socket.socket | None = None
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="islands-sender", daemon=True)
        self._thread.start()

    def put(self, number: int, kind: str, contents: Sequence[bytes]) -> None:
        """Add a message to those that the thread sends."""
        header = {"rendezvous": number, "kind": kind, "sizes": [len(content) for content in contents]}
        self._queue.put(_Parcel(write_message(header), contents))

    def finish(self) -> None:
        """Let the thread end once all messages have arrived, and do not wait for it."""
        self._queue.put(None)

    def has_ended(self, wait_seconds: float) -> bool:
        """Wait for the end of the thread for so many seconds at most, and say whether it has ended."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def gone_bytes(self) -> int:
        """Count the bytes that have left this machine: a slow network takes long for those that the kernel holds.

        Where the kernel does not say how many it holds, these count, too.
        """
        # ioctl writes its answer, a C int, into this array.
        held, connection = array("i", [0]), self._connection
        if connection is not None:
            with suppress(OSError, ValueError):  # the kernel does not say it; the connection has ended
                fcntl.ioctl(connection, termios.TIOCOUTQ, held)
        return self._sent_bytes - held[0]

    def close(self) -> None:
        """End the thread and its connection, whatever is still under way."""
        self._queue.put(None)
        self._is_closed.set()
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # ended before
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (parcel := self._queue.get()) is not None and not self._is_closed.is_set():
            while not self._is_closed.is_set() and not self._try_to_send(parcel):
                self._is_closed.wait(_RETRY_SECONDS)
        if self._connection is not None:
            with suppress(OSError):  # ended by the other side, or by `close`
                # The other side ends the connection once it has read all: only then may this one.
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.recv(1)
            self._connection.close()

    def _try_to_send(self, parcel: _Parcel) -> bool:
        """Send a message, on a new connection if there is none; False: it must be sent anew from its begin."""
        sent_before = self._sent_bytes
        try:
            if self._connection is None:
                hello = {_SENDER: self._own_address}
                self._connection, _ = knock(self._address, self._secret, hello, {}, _CONNECT_SECONDS)
                # How long a slow network takes is for who waits to judge.
                self._connection.settimeout(None)
            self._connection.sendall(parcel.header)
            for content in parcel.contents:
                for start in range(0, len(content), _SLICE_BYTES):
                    self._connection.sendall(memoryview(content)[start : start + _SLICE_BYTES])
                    self._sent_bytes += _SLICE_BYTES
        except (OSError, NotAMessageError, RefusedError):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._sent_bytes = sent_before
            return False
        return True
