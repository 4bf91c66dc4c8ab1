"""One rank's connections to all shards of a parameter server: they are asked together, and end together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hfdist.collectives import gather_json, on_all_ranks, rank
from hfdist.islands.member import Member
from hfdist.messages.message import Message


class ShardMembers:
    """The connections of one rank. All ranks of an island make it and call its methods together.

    Args:
        first: to the server, which has the first shard, and says where the others are.
    """

    def __init__(self, first: Member) -> None:
        self._first = first
        self._others: list[Member] = []

    def connect(self) -> None:
        """Connect, if there is no connection; raises what `Member.connect` does."""
        if self._others:
            # Ended is one to another shard, perhaps, and the server says why.
            self._first.hear_out()
            self._close_others()
        on_all_ranks(self._first.connect)
        welcome = Message(gather_json(self._first.welcome)[0])
        more = {"ticket": welcome.text("ticket")}
        self._others = [self._first.beside(one, {"rank": rank()}, more) for one in welcome.list("shards")]
        for other in self._others:
            on_all_ranks(other.connect)

    def ask(self, messages: Sequence[Mapping[str, object]], contents: Sequence[bytes]) -> list[Message] | None:
        """Send to each shard at once, and wait for weights; None: a connection of some rank has ended.

        Args:
            messages: one for each shard; a shard that gets none has weights all the same.
            contents: what follows each message.
        """
        members = [self._first, *self._others]
        with ThreadPoolExecutor(len(members)) as threads:
            # A pull is for the first alone.
            list(threads.map(Member.send, members[: len(messages)], messages, contents))
        answers = [member.wait_for("weights") for member in members]
        found = [answer for answer in answers if answer is not None]
        is_whole = len(found) == len(members) and len({answer.integer("weights") for answer in found}) == 1
        return found if all(gather_json(is_whole)) else None

    def hear_why(self) -> None:
        """Hear the server out once a connection has ended; PeerError: it says that it has ended this island."""
        self._first.hear_out()
        on_all_ranks(self._first.raise_if_ended)

    def leave(self) -> None:
        """Take part no more."""
        if rank() == 0:
            self._first.leave()
        self._first.close()
        self._close_others()

    def _close_others(self) -> None:
        for other in self._others:
            other.close()
        self._others = []
