"""One rank's connections to all shards of a parameter server: they are asked together, and end together.

The first goes to the server, which has the first shard itself and says at which addresses the others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hfdist.collectives import gather_json, on_all_ranks, rank
from hfdist.islands.member import Member
from hfdist.messages.message import Message


class ShardMembers:
    """The connections of one rank. All ranks of an island make it and call its methods together.

    Args:
        first: the connection to the server.
    """

    def __init__(self, first: Member) -> None:
        self._first = first
        self._others: list[Member] = []

    def connect(self) -> None:
        """Connect to the server, if there is no connection, and anew to each shard that it names.

        Raises:
            PeerError: the server or a shard does not answer, or the server has ended this island.
            ConfigError: the server or a shard refuses this rank.
        """
        if self._others:
            # The connection to a shard may be the one that has ended. The server's last words say why.
            self._first.hear_out()
            self._close_others()
        on_all_ranks(self._first.connect)
        # The server welcomes rank 0 with the addresses, and with a ticket by which the shards know this island.
        welcome = Message(gather_json(self._first.welcome)[0])
        ticket = {"ticket": welcome.text("ticket")}
        self._others = [self._first.beside(address, {"rank": rank()}, ticket) for address in welcome.list("shards")]
        for other in self._others:
            on_all_ranks(other.connect)

    def ask(self, messages: Sequence[Mapping[str, object]], contents: Sequence[bytes]) -> list[Message] | None:
        """Send to the shards, all at once, and wait until each has given weights.

        Args:
            messages: one for each shard in order; or one for the server alone, which then tells the others what to do.
            contents: bytes that follow each message.

        Returns:
            The answer of each shard, in order; None: a connection of some rank has ended.
        """
        members = [self._first, *self._others]
        with ThreadPoolExecutor(len(members)) as threads:
            sends = threads.map(Member.send, members[: len(messages)], messages, contents)
            # To wait for them, and to raise what a thread has raised.
            list(sends)
        answers = [member.wait_for("weights") for member in members]
        found = [answer for answer in answers if answer is not None]
        # Weights of different updates do not belong together.
        updates = {answer.integer("weights") for answer in found}
        is_whole = len(found) == len(members) and len(updates) == 1
        return found if all(gather_json(is_whole)) else None

    def hear_why(self) -> None:
        """Read the server's last words once a connection has ended; PeerError: the server has ended this island."""
        self._first.hear_out()
        on_all_ranks(self._first.raise_if_ended)

    def leave(self) -> None:
        """Tell the server that this island has ended, and close all connections."""
        if rank() == 0:
            self._first.leave()
        self._first.close()
        self._close_others()

    def _close_others(self) -> None:
        for other in self._others:
            other.close()
        self._others = []
