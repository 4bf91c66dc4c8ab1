"""The ends of rounds: which islands exchange what they have learned, and which get the state of another.

Islands come to a rendezvous at the end of each round. Once all connected islands have come, those whose outer weights
are the same are its members: they exchange what they have learned. The others are joiners: each gets a member's state.

    all have come --> round: they train         no member has learned anything yet
                  --> exchange --> commit       each member has the parts of all others: it counts
                               --> aborted      a member is lost, or lacks a part: they come again

A member whose part the others cannot use is left out of the next exchange, and gets a member's state.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfdist.errors import printable
from hfdist.islands.membership import Island, JobIslands
from hfdist.islands.rendezvous_messages import Arrival
from hfdist.messages.message import Message, NotAMessageError

_MOST_TIMES_OUT = 3
"""The number of exchanges in a row that leave an island out before the server ends it."""
_AGAIN_SECONDS = 120.0
"""Seconds in which the members of an aborted exchange must come again."""
_LATE_SECONDS = 1800.0
"""Seconds in which the other islands must end an exchange once one of them has."""
_MOST_SAID = 200
"""The most characters of an island's complaint that a line for people shows."""


@dataclass
class _Exchange:
    """An exchange that is under way."""

    number: int
    members: list[int]
    sources: dict[int, int]
    """Index of the member that gives its state, by the index of the joiner that gets it."""
    missing: set[int]
    """Members that do not have the parts of all others yet; the exchange counts once there are none."""
    read: dict[int, object]
    """What each member has read of the data."""
    there: list[int]
    """Islands that take part in the round that follows."""


class Rendezvous:
    """The coordinator of rounds: it decides who takes part in each exchange.

    Args:
        job: values that all islands have alike, by key.
        islands: the connected islands of the job.
    """

    def __init__(self, job: Message, islands: JobIslands) -> None:
        self._islands, self._end_island, self._say = islands.connected, islands.end, islands.say
        count = job.integer("islands.count", least=1)
        self._least = count if islands.least is None else islands.least
        self._participation = job.number("islands.participation") if "islands.participation" in job else 1.0
        self._arrivals: dict[int, Arrival] = {}
        """Arrivals of the islands that wait, by their index."""
        self._under_way: _Exchange | None = None
        self._number = 0
        """Number of the last rendezvous, from 1."""
        self._has_begun = False
        self._there: list[int] = []
        """Islands that were dealt data for the present round; empty: this server does not know them."""
        self._complaints: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """Why parts could not be used in the exchange that was aborted last, by whose part it is and by who says so."""
        self._aborted: set[int] = set()
        """Members of the exchange that was aborted last."""
        self._left_out: set[int] = set()
        """Islands that the next exchange leaves out."""
        self._times_out: Counter[int] = Counter()
        """Number of exchanges in a row that have left an island out, by its index."""
        self._until = math.inf
        """Time on the clock at which the islands that keep the others waiting are lost."""

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give 0, the number of bytes that may follow a message: weights travel between the islands."""
        return 0

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Take the message of a rank: its island has come, or has ended its part of an exchange.

        Raises:
            NotAMessageError: no rank would send it.
        """
        if "at" in message:
            self._arrivals[island.index] = Arrival.from_json(message.list("at"))
            self._meet()
        elif "done" in message:
            number, is_ok = message.integer("done"), message.flag("ok")
            if "bad" in message:
                self._note_complaints(island.index, number, message.by_number("bad"))
            self._end_part(island.index, number, is_ok=is_ok)
        else:
            raise NotAMessageError("no rank says that here")

    def tick(self) -> None:
        """End the islands that have kept the others waiting for too long."""
        if time.monotonic() < self._until:
            return
        self._until = math.inf
        under_way = self._under_way
        if under_way is None:
            late = self._aborted - self._arrivals.keys()
        elif under_way.missing:
            late = under_way.missing
        else:
            late = set(under_way.sources)
        for index in sorted(late & self._islands.keys()):
            self._end_island(self._islands[index], "it keeps the others waiting in an exchange")

    def lose(self, index: int) -> None:
        """Go on without an island that has left."""
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
                self._tell_aborted([joiner], under_way.number)
            self._end_if_done(under_way)
        self._meet()

    def _meet(self) -> None:
        """Begin a round or an exchange, if all connected islands have come."""
        there = [island for island in self._islands.values() if island.is_complete]
        arrivals = {island.index: self._arrivals[island.index] for island in there if island.index in self._arrivals}
        if self._under_way is not None or not arrivals or len(arrivals) < len(there):
            return
        if self._leave_out():
            # An island was ended, and `lose` has called this method again.
            return
        if not self._has_begun and len(there) < self._least:
            self._say(f"{len(there)} of {self._least} islands are there")
            return
        self._has_begun = True
        self._number += 1
        newest = _with_newest_outer(arrivals)
        # If all who were to train are lost, the others do.
        candidates = {index: arrival for index, arrival in newest.items() if not arrival.rests} or newest
        at_start = sorted(index for index, arrival in candidates.items() if arrival.is_start)
        if len(at_start) == len(candidates):
            self._begin_round(at_start, dealt=at_start)
            return
        # In the middle of a round each keeps what it was dealt. Who was dealt nothing gets a state at its end.
        dealt = self._there or sorted(newest)
        late_starters = [index for index in at_start if index in dealt]
        if late_starters:
            self._begin_round(late_starters, dealt)
        else:
            self._begin_exchange(candidates, arrivals)

    def _begin_round(self, starting: list[int], dealt: list[int]) -> None:
        """Let `starting` train, as they have nothing to exchange yet; the others wait. `dealt` have the data."""
        self._there = dealt
        message: dict[str, object] = {"round": self._number, "resting": self._draw_resting(starting), "there": dealt}
        self._tell_round(starting, message | {"members": [], "sources": {}, "weights": {}})

    def _begin_exchange(self, candidates: Mapping[int, Arrival], arrivals: Mapping[int, Arrival]) -> None:
        """Let the candidates at the last step exchange, and give a member's state to each other island."""
        last = max(arrival.step for arrival in candidates.values())
        at_last = sorted(index for index, arrival in candidates.items() if arrival.step == last)
        members = [index for index in at_last if index not in self._left_out] or at_last
        joiners = sorted(arrivals.keys() - set(members))
        there = sorted(arrivals)
        sources = {joiner: members[number % len(members)] for number, joiner in enumerate(joiners)}
        read = {index: arrivals[index].read for index in members}
        self._under_way = _Exchange(self._number, members, sources, missing=set(members), read=read, there=there)
        self._until = math.inf
        for index in there:
            self._islands[index].introduce(self._islands[one] for one in there)
        message: dict[str, object] = {"round": self._number, "members": members, "sources": sources, "there": there}
        message["weights"] = {index: arrivals[index].weight for index in members}
        message["resting"] = self._draw_resting(there)
        self._tell_round([*members, *joiners], message)
        line = f"step {last}: islands {_listed(members)} exchange"
        if joiners:
            line += f"; {_listed(joiners)} will get their state"
        self._say(line)

    def _draw_resting(self, there: Sequence[int]) -> list[int]:
        """Draw the islands that do not train in the round that follows."""
        num_resting = max(0, len(there) - math.ceil(self._participation * len(there)))
        return random.Random(self._number).sample(sorted(there), num_resting)

    def _leave_out(self) -> bool:
        """Leave the islands out of which most others complain, or that complain of themselves.

        Returns:
            Whether one of them was ended, as it was left out too often.
        """
        complaints, self._complaints = self._complaints, defaultdict(dict)
        if not complaints:
            return False
        counts = {index: math.inf if index in by else len(by) for index, by in complaints.items()}
        largest = max(counts.values())
        accused = {index for index, count in counts.items() if count == largest}
        if accused >= self._aborted:
            # Each says it of the other: nobody can tell.
            return False
        has_ended = False
        for index in sorted(accused & self._islands.keys()):
            by = complaints[index]
            first_reason = next(iter(by.values()))
            why = f"islands {_listed(sorted(by))} could not use its part: {first_reason}"
            self._say(f"island {index} is left out of the exchange: {why}")
            self._left_out.add(index)
            self._times_out[index] += 1
            if self._times_out[index] >= _MOST_TIMES_OUT:
                has_ended = True
                self._end_island(self._islands[index], f"{_MOST_TIMES_OUT} exchanges in a row, {why}")
        return has_ended

    def _note_complaints(self, index: int, number: int, bad: Mapping[int, object]) -> None:
        """Note whose parts a member could not use in the last rendezvous, and why; strangers are not heard."""
        members = set(self._aborted)
        if self._under_way is not None:
            members.update(self._under_way.members)
        if number == self._number and index in members:
            for other, why in bad.items():
                self._complaints[other][index] = printable(f"{why}", _MOST_SAID)

    def _end_part(self, index: int, number: int, *, is_ok: bool) -> None:
        """Note that an island has ended its part of an exchange: it has all that it needs, or lacks something."""
        under_way = self._under_way
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
                self._commit(under_way)
        elif index in under_way.sources:
            del under_way.sources[index]
            self._say(f"island {index} takes part" if is_ok else f"island {index} has not got the state of another")
        self._end_if_done(under_way)

    def _commit(self, under_way: _Exchange) -> None:
        """Let an exchange count, as each member has the parts of all."""
        for member in under_way.members:
            self._times_out.pop(member, None)
        self._left_out = set()
        self._there = under_way.there
        for index in under_way.members:
            self._islands[index].tell_first({"commit": under_way.number, "read": under_way.read})

    def _end_if_done(self, under_way: _Exchange) -> None:
        """Go on to the next rendezvous once no member and no joiner is waited for."""
        if not under_way.missing and not under_way.sources:
            self._under_way = None
            self._meet()

    def _abort(self, under_way: _Exchange) -> None:
        """Give an exchange up; its islands come again."""
        self._under_way, self._aborted = None, set(under_way.members)
        self._until = time.monotonic() + _AGAIN_SECONDS
        self._say("the exchange is aborted: those who are left exchange anew")
        self._tell_aborted([*under_way.members, *under_way.sources], under_way.number)

    def _tell_round(self, indices: Sequence[int], message: Mapping[str, object]) -> None:
        """Tell rank 0 of islands who takes part. They have to come again for the next rendezvous."""
        for index in indices:
            self._arrivals.pop(index, None)
            self._islands[index].tell_first(message)

    def _tell_aborted(self, indices: Sequence[int], number: int) -> None:
        """Tell all ranks of islands, each of which may wait for what others send. The islands have to come again."""
        for index in indices:
            self._arrivals.pop(index, None)
            # An island that has left cannot be told.
            if index in self._islands:
                self._islands[index].tell({"aborted": number})


def _with_newest_outer(arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
    """Give the arrivals with the newest outer weights; of several at the same step, those of most islands."""
    outers = [arrival.outer for arrival in arrivals.values()]
    # The digest decides between two that as many islands have.
    newest = max(outers, key=lambda outer: (outer.step, outers.count(outer), outer.digest))
    return {index: arrival for index, arrival in arrivals.items() if arrival.outer == newest}


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
