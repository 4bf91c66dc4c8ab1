"""The ends of rounds: which islands exchange what they have learned, and which get the state of another.

Islands come to a rendezvous at the end of each round. Once all that are there have come, those whose outer weights are
the same exchange what they have learned, and the others get the state of one of these. An exchange counts once all have
it: if an island is lost before, it is aborted, and the rest come to another rendezvous.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfdist.islands.membership import Island


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where an island stands when it comes to a rendezvous."""

    step: int
    outer_step: int
    """Of the last round that counts."""
    digest: str
    """Of the outer weights behind it."""
    weight: float = 1.0
    """Of what it has learned, in the mean of all."""
    rests: bool = False
    """Whether it does not train in this round, and waits for what the others learn."""
    read: Any = None
    """What it has read of the data, for the others."""

    @property
    def outer(self) -> tuple[int, str]:
        """Equal for islands that may go on together."""
        return self.outer_step, self.digest

    @property
    def is_start(self) -> bool:
        """Whether it has learned nothing since."""
        return self.step == self.outer_step


@dataclass
class _Rendezvous:
    """An exchange that is under way."""

    number: int
    members: list[int]
    sources: dict[int, int]
    """Of islands that get the state of a member: that member, by their index."""
    missing: set[int]
    """Members that do not have all yet; once it is empty the exchange counts."""
    read: dict[int, Any]
    """What each member has read of the data."""


class Rendezvous:
    """Decides who takes part.

    Args:
        islands: that are connected, by index; it is live.
        least: islands with which the first round begins; None: as many as they say.
        say: takes a line for people.
    """

    def __init__(self, islands: Mapping[int, Island], least: int | None, say: Callable[[str], None]) -> None:
        self._islands, self._least, self._say = islands, least, say
        self._arrivals: dict[int, Arrival] = {}
        """By the index of an island that waits."""
        self._under_way: _Rendezvous | None = None
        self._number = 0
        self._has_begun = False

    def take(self, island: Island, rank: int, message: dict[str, Any], payload: bytes) -> None:
        """Take what a rank has sent."""
        if "at" in message:
            step, outer_step, digest, weight, rests, read = message["at"]
            self._arrivals[island.index] = Arrival(
                step=int(step),
                outer_step=int(outer_step),
                digest=str(digest),
                weight=float(weight),
                rests=bool(rests),
                read=read,
            )
            self._meet()
        elif "done" in message:
            self._note(island.index, int(message["done"]), bool(message["ok"]))

    def lose(self, index: int) -> None:
        """Go on without an island."""
        self._arrivals.pop(index, None)
        under_way = self._under_way
        if under_way is not None and index in under_way.members and under_way.missing:
            self._abort(under_way)
        elif under_way is not None:
            for joiner in [one for one, source in under_way.sources.items() if index in (one, source)]:
                del under_way.sources[joiner]
                self._tell([joiner], {"aborted": under_way.number})
            self._end(under_way)
        self._meet()

    def _meet(self) -> None:
        """Begin to exchange if all islands have come."""
        there = [island for island in self._islands.values() if island.is_complete]
        arrivals = {island.index: self._arrivals[island.index] for island in there if island.index in self._arrivals}
        if self._under_way is not None or not arrivals or len(arrivals) < len(there):
            return
        least = max(int(island.job["islands.count"]) for island in there) if self._least is None else self._least
        if not self._has_begun and len(there) < least:
            self._say(f"{len(there)} of {least} islands are there")
            return
        self._has_begun = True
        outers = [arrival.outer for arrival in arrivals.values()]
        # The newest, and of several those of most islands.
        newest = max(outers, key=lambda outer: (outer[0], outers.count(outer), outer[1]))
        alike = {index: arrival for index, arrival in arrivals.items() if arrival.outer == newest}
        # If all who were to train are lost, the others do.
        alike = {index: arrival for index, arrival in alike.items() if not arrival.rests} or alike
        starting = [index for index, arrival in alike.items() if arrival.is_start]
        self._number += 1
        if starting:
            # They have nothing to exchange yet. All others wait for them.
            nobody: dict[str, Any] = {"members": {}, "sources": {}, "weights": {}, "there": sorted(starting)}
            self._tell(starting, {"round": self._number, "resting": self._draw_resting(starting)} | nobody)
            return
        last = max(arrival.step for arrival in alike.values())
        members = sorted(index for index, arrival in alike.items() if arrival.step == last)
        others = sorted(index for index in arrivals if index not in members)
        sources = {joiner: members[place % len(members)] for place, joiner in enumerate(others)}
        read = {index: arrivals[index].read for index in members}
        self._under_way = _Rendezvous(self._number, members, sources, set(members), read)
        addresses = {index: self._islands[index].addresses for index in (*members, *others)}
        message = {"round": self._number, "members": {index: addresses[index] for index in members}}
        message |= {"weights": {index: arrivals[index].weight for index in members}}
        message |= {"resting": self._draw_resting([*members, *others]), "there": sorted(arrivals)}
        self._tell([*members, *others], message | {"sources": {j: [s, addresses[j]] for j, s in sources.items()}})
        text = f"step {last}: islands {', '.join(map(str, members))} exchange"
        self._say(text + (f"; {', '.join(map(str, others))} will get their state" if others else ""))

    def _draw_resting(self, there: Sequence[int]) -> list[int]:
        """Draw who does not train in the round that follows."""
        share = float(self._islands[there[0]].job.get("islands.participation", 1.0))
        number = len(there) - math.ceil(share * len(there))
        return random.Random(self._number).sample(sorted(there), number)

    def _note(self, index: int, number: int, is_ok: bool) -> None:
        under_way = self._under_way
        if under_way is None or under_way.number != number:
            return
        if index in under_way.missing:
            if not is_ok:
                self._abort(under_way)
                self._meet()
                return
            under_way.missing.discard(index)
            if not under_way.missing:
                self._tell(under_way.members, {"commit": number, "read": under_way.read})
        elif index in under_way.sources:
            del under_way.sources[index]
            self._say(f"island {index} takes part")
        self._end(under_way)

    def _end(self, under_way: _Rendezvous) -> None:
        if not under_way.missing and not under_way.sources:
            self._under_way = None
            self._meet()

    def _abort(self, under_way: _Rendezvous) -> None:
        self._under_way = None
        self._say("the exchange is aborted: those who are left exchange anew")
        self._tell([*under_way.members, *under_way.sources], {"aborted": under_way.number})

    def _tell(self, indices: list[int], message: dict[str, Any]) -> None:
        """Tell all ranks of some islands. Who is told of a rendezvous or its end has to come again for the next one."""
        for index in indices:
            if "commit" not in message:
                self._arrivals.pop(index, None)
            if (island := self._islands.get(index)) is not None:
                island.tell(message)
