"""One rank's connection to the server of the islands: it comes to meetings, and is told who takes part."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hfdist.errors import ConfigError, PeerError
from hfdist.islands.server import BEAT_SECONDS, Arrival

_RETRY_SECONDS = 0.5
_POLL_SECONDS = 0.2
_MOST_BYTES = 2**22
"""Of a message."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Who takes part."""

    number: int
    members: Mapping[int, list[str]]
    """Islands that exchange, with the addresses of their ranks; empty: nothing is exchanged."""
    donors: Mapping[int, tuple[int, list[str]]]
    """By the index of an island that gets the state of another: that other, and the addresses of its own ranks."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Meeting:
        """Read what the server has sent."""
        return cls(
            number=int(value["round"]),
            members={int(index): list(addresses) for index, addresses in value["members"].items()},
            donors={int(index): (int(donor), list(own)) for index, (donor, own) in value["donors"].items()},
        )


class Member:
    """Speaks to the server. Rank 0 speaks for its island; the others beat, and are told of void meetings.

    Args:
        address: HOST:PORT of the server.
        hello: what the server must know of this rank: island, rank, start, secret; of rank 0 also job and addresses.
        timeout_seconds: how long a server is looked for that does not answer.
    """

    def __init__(self, address: str, hello: Mapping[str, Any], timeout_seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._hello = (host.strip("[]"), int(port)), dict(hello)
        self._timeout_seconds = timeout_seconds
        self._connection: _Connection | None = None
        self.nonce = ""
        """Of the server; marks what islands send each other."""

    def connect(self) -> None:
        """Connect, if there is no connection.

        Raises:
            PeerError: the server does not answer for so long.
            ConfigError: it refuses this rank.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while self._connection is None or self._connection.is_broken.is_set():
            self.close()
            try:
                self._connection = _Connection(self._address, self._hello, self._timeout_seconds)
                self.nonce = self._connection.nonce
            except _RefusedError as error:
                if not error.may_pass or time.monotonic() > deadline:
                    raise error.reason from None
                time.sleep(_RETRY_SECONDS)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if time.monotonic() > deadline:
                    raise PeerError(
                        "the server of the islands does not answer",
                        where="islands.address",
                        found=f"{':'.join(map(str, self._address))}: {error}",
                        hint="hfdist serve port=29600 on that machine; the same command goes on from a checkpoint",
                    ) from error
                time.sleep(_RETRY_SECONDS)
        # Of earlier meetings.
        self._connection.forget()

    def arrive(self, arrival: Arrival) -> Meeting | None:
        """Wait for the other islands; None: the connection has ended."""
        assert self._connection is not None
        self._connection.send({"at": [arrival.step, arrival.outer_step, arrival.digest]})
        answer = self._connection.wait_for("round", None)
        return None if answer is None else Meeting.from_json(answer)

    def is_void(self, number: int) -> bool:
        """Whether a meeting has become void, as far as this rank knows. Never waits."""
        connection = self._connection
        return connection is None or connection.is_broken.is_set() or number in connection.void

    def finish(self, number: int, *, is_ok: bool) -> bool:
        """Tell whether this island has all, and wait for all others; give whether the exchange counts."""
        assert self._connection is not None
        self._connection.send({"done": number, "ok": is_ok})
        return self._connection.wait_for("commit", number) is not None

    def tell_done(self, number: int) -> None:
        """Tell that this island has got the state of another."""
        assert self._connection is not None
        self._connection.send({"done": number, "ok": True})

    def leave(self) -> None:
        """Take part no more."""
        if self._connection is not None:
            self._connection.send({"bye": 1})
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _RefusedError(Exception):
    """What the server has answered."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer)
        allowed = answer.get("allowed")
        self.may_pass = bool(answer.get("may_pass"))
        """Whether it may be otherwise in a moment."""
        self.reason = ConfigError(
            str(answer["refused"]),
            where=answer.get("key"),
            found=answer.get("found"),
            allowed=None if allowed is None else str(allowed),
        )


class _Connection:
    """Its threads read and beat."""

    def __init__(self, address: tuple[str, int], hello: Mapping[str, Any], timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._socket = socket.create_connection(address, timeout=timeout_seconds)
        self._lock = threading.Lock()
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.is_broken = threading.Event()
        self.void: set[int] = set()
        """Meetings that do not count."""
        try:
            self._socket.sendall(json.dumps(dict(hello)).encode() + b"\n")
            # Its time-out is that of the server's beats.
            self._answers = self._socket.makefile("rb")
            answer = json.loads(self._answers.readline(_MOST_BYTES))
            if "refused" in answer:
                raise _RefusedError(answer)
            self.nonce = str(answer["welcome"])
        except BaseException:
            self._socket.close()
            raise
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._beat)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send it, if there is a connection."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_broken.set()

    def wait_for(self, key: str, number: int | None) -> dict[str, Any] | None:
        """Wait for a message, of this meeting; None: the meeting is void, or the connection has ended."""
        while True:
            try:
                message = self._messages.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self.is_broken.is_set():
                    return None
                continue
            if key in message and number in (None, message[key]):
                return message
            if number is not None and message.get("void") == number:
                return None

    def forget(self) -> None:
        """Drop all messages so far."""
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()

    def close(self) -> None:
        """End the connection, and with it the threads."""
        self.is_broken.set()
        with suppress(OSError):  # ended before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            while (line := self._answers.readline(_MOST_BYTES)).endswith(b"\n"):
                message = json.loads(line)
                if "void" in message:
                    self.void.add(int(message["void"]))
                if "beat" not in message:
                    self._messages.put(message)
        self.is_broken.set()

    def _beat(self) -> None:
        while not self.is_broken.wait(BEAT_SECONDS):
            self.send({"beat": 1})
