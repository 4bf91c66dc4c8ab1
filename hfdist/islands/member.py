"""One rank's connection to the server of the islands: it comes to rendezvous, and is told who takes part."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping

from hfdist.collectives import gather_json, rank
from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError, PeerError, named_line
from hfdist.islands.rendezvous_messages import Arrival, Participants
from hfdist.islands.server_connection import ServerConnection
from hfdist.messages.door import SECRET, prove
from hfdist.messages.message import Message, NotAMessageError, RefusedError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_HINTS = {
    SECRET: f"the same {SECRET} in the environment of all islands and of the server",
    "islands.server_shards": "hfdist serve of=HOST:29600, once for each shard but the first",
}
"""What helps one that is refused, by the key of the refusal."""


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
        self._connection: ServerConnection | None = None
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
            # Messages of earlier rendezvous do not count. A new connection has none of these, and must keep its own.
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
        self._connection = ServerConnection(
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
