"""The ends of rounds: which islands exchange what they have learned, and which get the state of another.

Islands come to a rendezvous at the end of each round. Once all that are there have come, those whose outer weights are
the same exchange what they have learned, and the others get the state of one of these. An exchange counts once all have
it: if an island is lost before, it is aborted, and the rest come to another rendezvous. Whose part others cannot use is
left out of the next one, and gets the state of a member.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfdist.errors import printable
from hfdist.islands.membership import Island, JobIslands
from hfdist.islands.rendezvous_messages import Arrival
from hfdist.messages.message import Message, NotAMessageError

_MOST_TIMES_OUT = 3
_AGAIN_SECONDS = 120.0
"""Seconds in which the members of an aborted exchange must come again."""
_LATE_SECONDS = 1800.0
"""Seconds in which the other islands must end an exchange once one of them has."""
_MOST_SAID = 200
"""Characters of what an island has sent, in a line."""


@dataclass
class _Rendezvous:
    """An exchange that is under way."""

    number: int
    members: list[int]
    sources: dict[int, int]
    """Index of a member, by the index of an island that gets the state of that member."""
    missing: set[int]
    """Members that do not have all yet; once it is empty the exchange counts."""
    read: dict[int, object]
    """What each member has read of the data."""
    there: list[int]
    """Islands that take part in the round that follows."""


class Rendezvous:
    """Decides who takes part.

    Args:
        job: what all islands have alike, by key.
        islands: of the job.
    """

    def __init__(self, job: Message, islands: JobIslands) -> None:
        self._islands, self._end_island, self._say = islands.connected, islands.end, islands.say
        count = job.integer("islands.count", least=1)
        self._least = count if islands.least is None else islands.least
        self._participation = job.number("islands.participation") if "islands.participation" in job else 1.0
        self._arrivals: dict[int, Arrival] = {}
        """Arrivals of the islands that wait, by their index."""
        self._under_way: _Rendezvous | None = None
        self._number = 0
        self._has_begun = False
        self._there: list[int] = []
        """Islands that were dealt data for the present round; empty: this server does not know them."""
        self._accused: dict[int, dict[int, str]] = {}
        """Islands whose parts could not be used in the rendezvous that was aborted last: by whom, and why."""
        self._aborted: set[int] = set()
        """Members of the rendezvous that was aborted last."""
        self._left_out: set[int] = set()
        """Islands that the next exchange leaves out."""
        self._times_out: Counter[int] = Counter()
        """Number of exchanges in a row that have left an island out, by its index."""
        self._until = math.inf
        """Time on the clock at which the islands that are waited for are lost."""

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give none: weights travel between the islands."""
        return 0

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Take what a rank has sent."""
        if "at" in message:
            self._arrivals[island.index] = Arrival.from_json(message.list("at"))
            self._meet()
        elif "done" in message:
            bad = message.by_number("bad") if "bad" in message else {}
            self._note(island.index, message.integer("done"), message.flag("ok"), bad)
        else:
            raise NotAMessageError("no rank says that here")

    def tick(self) -> None:
        """Lose those who keep the others waiting for too long."""
        if time.monotonic() < self._until:
            return
        self._until, under_way = math.inf, self._under_way
        if under_way is None:
            late = self._aborted - self._arrivals.keys()
        else:
            late = under_way.missing or set(under_way.sources)
        for index in sorted(late & self._islands.keys()):
            self._end_island(self._islands[index], "it keeps the others waiting in an exchange")

    def lose(self, index: int) -> None:
        """Go on without an island."""
        self._arrivals.pop(index, None)
        self._aborted.discard(index)
        self._left_out.discard(index)
        self._times_out.pop(index, None)
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
        """Begin a round, or an exchange, if all islands have come."""
        there = [island for island in self._islands.values() if island.is_complete]
        arrivals = {island.index: self._arrivals[island.index] for island in there if island.index in self._arrivals}
        if self._under_way is not None or not arrivals or len(arrivals) < len(there) or self._leave_out():
            return
        if not self._has_begun and len(there) < self._least:
            self._say(f"{len(there)} of {self._least} islands are there")
            return
        self._has_begun = True
        outers = [arrival.outer for arrival in arrivals.values()]
        # The newest, and of several those of most islands.
        newest = max(outers, key=lambda outer: (outer[0], outers.count(outer), outer[1]))
        candidates = {index: arrival for index, arrival in arrivals.items() if arrival.outer == newest}
        dealt = self._there or sorted(candidates)
        # If all who were to train are lost, the others do.
        candidates = {index: arrival for index, arrival in candidates.items() if not arrival.rests} or candidates
        starting = [index for index, arrival in candidates.items() if arrival.is_start]
        if len(starting) == len(candidates):
            dealt = sorted(starting)
        else:
            # In a round each island keeps the data it was dealt. One that was dealt none gets a state at its end.
            starting = [index for index in starting if index in dealt]
        self._number += 1
        if starting:
            self._begin_round(starting, dealt)
        else:
            self._begin_exchange(candidates, arrivals)

    def _begin_round(self, starting: list[int], dealt: list[int]) -> None:
        """Let islands train that have nothing to exchange yet; all others wait for them. `dealt` have the data."""
        self._there = dealt
        nobody: dict[str, object] = {"members": [], "sources": {}, "weights": {}, "there": dealt}
        self._tell(starting, {"round": self._number, "resting": self._draw_resting(starting)} | nobody)

    def _begin_exchange(self, candidates: Mapping[int, Arrival], arrivals: Mapping[int, Arrival]) -> None:
        """Let the candidates at the last step exchange, and give the state of one of them to each other island."""
        last = max(arrival.step for arrival in candidates.values())
        at_last = sorted(index for index, arrival in candidates.items() if arrival.step == last)
        members = [index for index in at_last if index not in self._left_out] or at_last
        others = sorted(arrivals.keys() - set(members))
        sources = {joiner: members[number % len(members)] for number, joiner in enumerate(others)}
        read = {index: arrivals[index].read for index in members}
        self._under_way = _Rendezvous(self._number, members, sources, set(members), read, sorted(arrivals))
        self._until = math.inf
        for index in (*members, *others):
            self._islands[index].introduce(self._islands[one] for one in (*members, *others))
        message: dict[str, object] = {"round": self._number, "members": members, "sources": sources}
        message |= {"weights": {index: arrivals[index].weight for index in members}}
        message |= {"resting": self._draw_resting([*members, *others]), "there": sorted(arrivals)}
        self._tell([*members, *others], message)
        text = f"step {last}: islands {', '.join(map(str, members))} exchange"
        self._say(text + (f"; {', '.join(map(str, others))} will get their state" if others else ""))

    def _draw_resting(self, there: Sequence[int]) -> list[int]:
        """Draw who does not train in the round that follows."""
        number = max(0, len(there) - math.ceil(self._participation * len(there)))
        return random.Random(self._number).sample(sorted(there), number)

    def _leave_out(self) -> bool:
        """Leave out those of whom most have complained, or they themselves; say whether one of them was ended."""
        accused, self._accused = self._accused, {}
        if not accused:
            return False
        counts = {index: math.inf if index in by else len(by) for index, by in accused.items()}
        largest = max(counts.values())
        most = {index for index, count in counts.items() if count == largest}
        if most >= self._aborted:
            # Each says it of the other: nobody can tell.
            return False
        has_ended = False
        for index in sorted(most & self._islands.keys()):
            by = accused[index]
            why = f"islands {', '.join(map(str, sorted(by)))} could not use its part: {next(iter(by.values()))}"
            self._say(f"island {index} is left out of the exchange: {why}")
            self._left_out.add(index)
            self._times_out[index] += 1
            if self._times_out[index] >= _MOST_TIMES_OUT:
                has_ended = True
                self._end_island(self._islands[index], f"{_MOST_TIMES_OUT} exchanges in a row, {why}")
        return has_ended

    def _note(self, index: int, number: int, is_ok: bool, bad: Mapping[int, object]) -> None:
        under_way = self._under_way
        if number == self._number and index in self._aborted | set(under_way.members if under_way else ()):
            for other, why in bad.items():
                self._accused.setdefault(other, {})[index] = printable(f"{why}", _MOST_SAID)
        if under_way is None or under_way.number != number:
            return
        self._until = time.monotonic() + _LATE_SECONDS
        if index in under_way.missing:
            if not is_ok:
                self._abort(under_way)
                self._meet()
                return
            under_way.missing.discard(index)
            if not under_way.missing:
                for member in under_way.members:
                    self._times_out.pop(member, None)
                self._left_out, self._there = set(), under_way.there
                self._tell(under_way.members, {"commit": number, "read": under_way.read})
        elif index in under_way.sources:
            del under_way.sources[index]
            self._say(f"island {index} takes part" if is_ok else f"island {index} has not got the state of another")
        self._end(under_way)

    def _end(self, under_way: _Rendezvous) -> None:
        if not under_way.missing and not under_way.sources:
            self._under_way = None
            self._meet()

    def _abort(self, under_way: _Rendezvous) -> None:
        self._under_way, self._aborted = None, set(under_way.members)
        self._until = time.monotonic() + _AGAIN_SECONDS
        self._say("the exchange is aborted: those who are left exchange anew")
        self._tell([*under_way.members, *under_way.sources], {"aborted": under_way.number})

    def _tell(self, indices: list[int], message: Mapping[str, object]) -> None:
        """Tell some islands. Who is told of a rendezvous or its end has to come again for the next one."""
        for index in indices:
            if "commit" not in message:
                self._arrivals.pop(index, None)
            if (island := self._islands.get(index)) is not None:
                # Each rank waits for what others send in an exchange.
                (island.tell if "aborted" in message else island.tell_first)(message)
