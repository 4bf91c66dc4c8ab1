"""A connection of one rank to a server of islands, with a thread that reads its messages and one that beats."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

from hfdist.islands.membership import BEAT_SECONDS
from hfdist.messages.door import SECRET, hear_answer, knock
from hfdist.messages.message import MOST_BYTES, Message, RefusedError, read_message, write_message

_POLL_SECONDS = 0.2


class ServerConnection:
    """An open connection.

    Args:
        address: of the server.
        secret: that all islands and their server know; empty: none.
        hello: what the server must know of this rank.
        more: what is told to a server that has proven to know the secret.
        timeout_seconds: silence after which the server is lost.
        is_broken: set once the connection has ended; several connections that end together share it.

    Raises:
        RefusedError: the server refuses this rank.
        OSError, NotAMessageError: there is no server that answers.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        hello: Mapping[str, object],
        more: Mapping[str, object],
        timeout_seconds: float,
        is_broken: threading.Event,
    ) -> None:
        self._lock = threading.Lock()
        self._messages: queue.Queue[Message] = queue.Queue()
        self.is_broken = is_broken
        self.aborted: set[int] = set()
        """Numbers of rendezvous that do not count."""
        self.addresses: dict[int, object] = {}
        """Addresses of the ranks of each island, as the server has told them once."""
        self.ended: str | None = None
        """Why the server lets this island take part no more."""
        # The server beats, so that it is never silent for long.
        self._socket, self._answers = knock(address, secret, hello, more, timeout_seconds)
        try:
            answer = hear_answer(self._answers)
            if "challenge" in answer:
                raise RefusedError(refused="the server asks for a secret, and this island has none", key=SECRET)
            self.welcome, self.nonce = answer, answer.text("welcome")
        except BaseException:
            self._socket.close()
            raise
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._beat)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Send a message and what follows it, if there is a connection."""
        try:
            with self._lock:
                self._socket.sendall(write_message(message, len(payload)))
                # It sends parts, since a time-out is for a whole call, however much that sends.
                for start in range(0, len(payload), MOST_BYTES):
                    self._socket.sendall(payload[start : start + MOST_BYTES])
        except OSError:
            self.is_broken.set()

    def wait_for(self, key: str, number: int | None) -> Message | None:
        """Wait for a message, of this rendezvous; None: the rendezvous is aborted, or the connection has ended."""
        while True:
            try:
                message = self._messages.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self.is_broken.is_set():
                    return None
                continue
            if key in message and number in (None, message[key]):
                return message
            if number is not None and message.get("aborted") == number:
                return None

    def forget(self) -> None:
        """Drop all messages so far."""
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()

    def hear_out(self) -> None:
        """Beat no more, and hear the server until it ends the connection."""
        self.is_broken.set()
        self._threads[0].join()

    def close(self) -> None:
        """End the connection, and with it the threads."""
        self.is_broken.set()
        with suppress(OSError):  # ended before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        try:
            # MemoryError: more bytes are said to follow a message than there is memory for.
            with suppress(OSError, ValueError, MemoryError):
                while (line := self._answers.readline(MOST_BYTES)).endswith(b"\n"):
                    message = read_message(line)
                    if num_bytes := message.integer("bytes", default=0):
                        message["payload"] = self._answers.read(num_bytes)
                        if len(message["payload"]) < num_bytes:
                            break
                    self._take(message)
        finally:
            self.is_broken.set()

    def _take(self, message: Message) -> None:
        if "aborted" in message:
            self.aborted.add(message.integer("aborted"))
        if "ended" in message:
            self.ended = message.text("ended")
        if "addresses" in message:
            self.addresses |= message.by_number("addresses")
        elif "beat" not in message:
            self._messages.put(message)

    def _beat(self) -> None:
        while not self.is_broken.wait(BEAT_SECONDS):
            self.send({"beat": 1})
