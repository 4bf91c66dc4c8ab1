"""One rank's connection to the server of the islands: it comes to rendezvous, and is told who takes part."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hfdist.collectives import gather_json, rank
from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError, PeerError, named_line
from hfdist.islands.membership import BEAT_SECONDS
from hfdist.islands.rendezvous import Arrival
from hfdist.messages.door import SECRET, hear_answer, knock, prove
from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, RefusedError, read_message, write_message

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_POLL_SECONDS = 0.2
_HINTS = {
    SECRET: f"the same {SECRET} in the environment of all islands and of the server",
    "islands.server_shards": "hfdist serve of=HOST:29600, once for each shard but the first",
}
"""What helps one that is refused, by the key of the refusal."""


@dataclass(frozen=True, kw_only=True)
class Participants:
    """Who takes part in an exchange."""

    number: int
    members: Mapping[int, list[str]]
    """Islands that exchange, with the addresses of their ranks; empty: nothing is exchanged."""
    weights: Mapping[int, float]
    """Weight of what each island has learned, in the mean of all, by the island's index."""
    resting: list[int]
    """Islands that do not train in the next round."""
    there: list[int]
    """Islands that take part in the round that follows."""
    sources: Mapping[int, tuple[int, list[str]]]
    """The island that gives its state, and the addresses of the island that gets it, by the index of that one."""

    def island_of(self, address: str, rank: int) -> int:
        """Give the member whose rank has an address."""
        return next(index for index, addresses in self.members.items() if addresses[rank] == address)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Participants:
        """Read what `Member.arrive` has given."""
        addresses = {int(index): list(own) for index, own in value["addresses"].items()}
        return cls(
            number=int(value["round"]),
            members={int(index): addresses[int(index)] for index in value["members"]},
            weights={int(index): float(weight) for index, weight in value["weights"].items()},
            resting=[int(index) for index in value["resting"]],
            there=[int(index) for index in value["there"]],
            sources={int(index): (int(source), addresses[int(index)]) for index, source in value["sources"].items()},
        )


def make_member(config: IslandsConfig, job: Mapping[str, object], addresses: list[str]) -> Member:
    """Make the connection of this rank, without connecting. A collective.

    Args:
        config: `islands.*`.
        job: what must be the same on all islands, by key.
        addresses: of the ranks of this island, for others.
    """
    assert config.address is not None
    hello = {"island": config.index, "rank": rank(), "start": gather_json(secrets.token_hex(16))[0]}
    more = {"job": dict(job), "addresses": addresses} if rank() == 0 else {}
    return Member(config.address, os.environ.get(SECRET, ""), hello, more, config.timeout_seconds)


class Member:
    """Speaks to the server. Rank 0 speaks for its island; the others beat, and are told of aborted rendezvous.

    Args:
        address: HOST:PORT of the server.
        secret: that all islands and their server know; empty: none.
        hello: what the server must know of this rank: island, rank, start.
        more: what rank 0 adds for a server that has proven to know the secret: job, addresses.
        timeout_seconds: for which a server is tried that does not answer.
    """

    def __init__(
        self, address: str, secret: str, hello: Mapping[str, object], more: Mapping[str, object], timeout_seconds: float
    ) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._secret = (host.strip("[]"), int(port)), secret
        self._hello, self._more = dict(hello), dict(more)
        self._timeout_seconds = timeout_seconds
        self._connection: _Connection | None = None
        self._ends_with: Member | None = None
        self.nonce = ""
        """Nonce of the server; it marks what islands send each other."""

    def beside(self, address: str, hello: Mapping[str, object], more: Mapping[str, object]) -> Member:
        """Make a connection to another address, which ends once this one does, and this one once it does."""
        made = Member(address, self._secret, hello, more, self._timeout_seconds)
        made._ends_with = self
        return made

    @property
    def welcome(self) -> Message:
        """What the server has said when it let this rank in."""
        assert self._connection is not None
        return self._connection.welcome

    def connect(self) -> None:
        """Connect, if there is no connection.

        Raises:
            PeerError: the server does not answer for so long, or has ended this island.
            ConfigError: it refuses this rank.
        """
        if self._connection is not None:
            # Of earlier rendezvous. A new connection has none, and what comes with its welcome counts.
            self._connection.forget()
        deadline, is_told = time.monotonic() + self._timeout_seconds, False
        while self._connection is None or (self._ends_with is None and self._connection.is_broken.is_set()):
            (self._ends_with or self).raise_if_ended()
            self.close()
            try:
                self._open()
            except RefusedError as error:
                # Perhaps it may be otherwise in a moment.
                if not error.answer.get("may_pass") or time.monotonic() > deadline:
                    raise _refusal(error.answer) from None
                why = str(error.answer["refused"])
            except (OSError, NotAMessageError) as error:
                if time.monotonic() > deadline:
                    raise PeerError(
                        "the server of the islands does not answer",
                        where="islands.address",
                        found=f"{':'.join(map(str, self._address))}: {error}",
                        hint="hfdist serve port=29600 on that machine; the same command goes on from a checkpoint",
                    ) from error
                why = f"no answer: {error}"
            else:
                continue
            if not is_told:
                logger.info("waiting for the server of the islands, at most %.0f s: %s", self._timeout_seconds, why)
                is_told = True
            time.sleep(_RETRY_SECONDS)

    def _open(self) -> None:
        self._connection = _Connection(
            self._address, self._secret, self._hello, self._more, self._timeout_seconds, self._is_broken()
        )
        # Whoever only sees what travels does not know it.
        self.nonce = prove(self._secret, "islands", self._connection.nonce)

    def _is_broken(self) -> threading.Event:
        if self._ends_with is None:
            return threading.Event()
        assert self._ends_with._connection is not None
        return self._ends_with._connection.is_broken

    def hear_out(self) -> None:
        """Beat no more, and hear the server until it ends the connection: its last words say why."""
        if self._connection is not None:
            self._connection.hear_out()

    def raise_if_ended(self) -> None:
        """Raise a PeerError if the server has ended this island, as far as this rank knows."""
        if self._connection is not None and self._connection.ended is not None:
            what, hint = "the server has ended this island", "the same command goes on from its last checkpoint"
            raise PeerError(what, where="islands.index", found=self._connection.ended, hint=hint)

    def arrive(self, arrival: Arrival) -> Message | None:
        """Wait for the other islands; give `Participants` as JSON, or None: the connection has ended.

        Raises:
            PeerError: the answer is that of another version.
        """
        self.send({"at": arrival.to_json()})
        answer = self.wait_for("round")
        if answer is None or self._connection is None:
            return None
        known = self._connection.addresses
        try:
            named = (*answer.list("members"), *answer.by_number("sources"))
            told = Message(answer | {"addresses": {index: known[index] for index in named}})
            Participants.from_json(told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what, hint = "the server speaks another version of hfdist", "the same version on all machines"
            found = named_line(error)
            raise PeerError(what, where="islands.address", found=found, hint=hint) from error
        return told

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Tell the server, if there is a connection."""
        assert self._connection is not None
        self._connection.send(message, payload)

    def wait_for(self, key: str) -> Message | None:
        """Wait for a message with this key; None: the connection has ended. What follows a message is its `payload`."""
        assert self._connection is not None
        return self._connection.wait_for(key, None)

    def is_aborted(self, number: int) -> bool:
        """Whether a rendezvous has been aborted, as far as this rank knows. Never waits."""
        connection = self._connection
        return connection is None or connection.is_broken.is_set() or number in connection.aborted

    def finish(self, number: int, *, is_ok: bool, bad: Mapping[int, str] | None = None) -> dict[int, object] | None:
        """Tell whether this island has all, or whose parts it could not use and why, and wait for all others.

        Returns:
            What each member has read of the data, if the exchange counts.
        """
        assert self._connection is not None
        self.send({"done": number, "ok": is_ok, "bad": bad or {}})
        answer = self._connection.wait_for("commit", number)
        return None if answer is None else {int(index): read for index, read in answer["read"].items()}

    def tell_done(self, number: int, *, is_ok: bool) -> None:
        """Tell whether this island has got the state of another."""
        self.send({"done": number, "ok": is_ok})

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


def _refusal(answer: Mapping[str, object]) -> ConfigError:
    """Make the error of a rank that the server has refused."""
    key, allowed = answer.get("key"), answer.get("allowed")
    return ConfigError(
        str(answer["refused"]),
        where=None if key is None else str(key),
        found=answer.get("found"),
        allowed=None if allowed is None else str(allowed),
        hint=_HINTS.get(str(key)),
    )


class _Connection:
    """A connection, with a thread that reads and one that beats."""

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
        # Its time-out is that of the server's beats.
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
                # By parts: a time-out is that of a whole call.
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
            # No memory: for what is said to follow a message.
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
