"""The tree in which heartbeats go up and verdicts go down, and what a rank has heard of those below it. Loads no torch.

    0                         rank 0 judges all
    |-- 1  2  3               the other ranks of its machine
    |-- 4                     the first rank of another machine, or of WIDTH machines
        |-- 5  6  7
        |-- 8 -- 9 10 11

While all is well, a rank says of all below it a few numbers, however many they are. Once one is silent, has lost a
connection or has ended with an error, it says what it knows of each, so that rank 0 judges as if it had heard them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hfdist.watch.diagnosis import is_too_long
from hfdist.watch.heartbeat import Heartbeat, PeerState

WIDTH = 32
"""Most leaders that speak to one leader, itself included."""
BEATS_UNTIL_NOTED = 1.5
"""Beats for which a rank may be silent before the ranks above it hear of that."""

_PAUSE_BEATS = 3
"""Beats without a look at the others after which this process itself must have been stopped."""


class Digest(NamedTuple):
    """A summary of several ranks, of constant size; ranks that have ended count only in `is_noted`."""

    num_ranks: int = 0
    """Number of ranks that have not ended."""
    idle_seconds: float = 0.0
    """Seconds since the last mark of the rank whose last mark is the newest."""
    longest_idle_seconds: float = 0.0
    """Most seconds between two marks of a rank so far."""
    is_exempt: bool = False
    """Whether a rank is in a state without marks."""
    is_noted: bool = False
    """Whether something may be wrong with a rank: then the message says what is known of each, too."""

    @classmethod
    def merged(cls, digests: Iterable[Digest]) -> Digest:
        """Give one digest of all ranks that several digests are about."""
        several = list(digests)
        running = [one for one in several if one.num_ranks > 0]
        return cls(
            num_ranks=sum(one.num_ranks for one in running),
            idle_seconds=min((one.idle_seconds for one in running), default=0.0),
            longest_idle_seconds=max((one.longest_idle_seconds for one in running), default=0.0),
            is_exempt=any(one.is_exempt for one in running),
            is_noted=any(one.is_noted for one in several),
        )

    @classmethod
    def of(cls, state: PeerState, beat_seconds: float) -> Digest:
        """Give the digest of one rank."""
        beat = state.beat
        if beat.left is not None:
            return cls(is_noted=beat.left != 0)
        is_silent = state.silent_seconds > BEATS_UNTIL_NOTED * beat_seconds
        return cls(
            num_ranks=1,
            idle_seconds=beat.idle_seconds,
            longest_idle_seconds=beat.longest_idle_seconds,
            is_exempt=beat.exempt is not None,
            is_noted=is_silent or beat.broken_seconds is not None,
        )

    def is_suspect(self, heartbeat_seconds: float) -> bool:
        """Whether one of these ranks may be lost, or all may be stalled: then each is looked at."""
        is_idle = is_too_long(self.idle_seconds, self.longest_idle_seconds, heartbeat_seconds)
        return self.is_noted or (is_idle and not self.is_exempt)


ALL_HAVE_ENDED = Digest()


def find_parents(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Give the rank above each rank but rank 0, by rank.

    Above the ranks of a machine is its first rank, a leader. Above WIDTH leaders is the first of them, and so on.

    Args:
        machines: the ranks of each machine.
    """
    parents: dict[int, int] = {}
    groups = machines
    while True:
        parents |= {number: group[0] for group in groups for number in group[1:]}
        if len(groups) == 1:
            return parents
        leaders = [group[0] for group in groups]
        groups = [leaders[begin : begin + WIDTH] for begin in range(0, len(leaders), WIDTH)]


def find_above(own: int, parents: Mapping[int, int]) -> list[int]:
    """Give the ranks above the rank `own`, the nearest first; the last is rank 0, which itself has none."""
    above = []
    while own in parents:
        own = parents[own]
        above.append(own)
    return above


class Below:
    """The record of what a rank has heard of the ranks below it. One thread writes what comes, others read.

    A rank whose leader is lost speaks to the next one above: then it is heard both ways, and the newest counts.

    Args:
        own: number of this rank.
        known: a first heartbeat of each rank of the run, in order of rank.
        parents: the rank above each rank but rank 0, as `find_parents` gives it.
        now: the time by this process's monotonic clock, in seconds; so is each `now` of a method.
    """

    def __init__(self, own: int, known: Sequence[Heartbeat], parents: Mapping[int, int], now: float) -> None:
        self.of_rank_0 = known[0]
        """The first heartbeat of rank 0."""
        self.depth = 0
        """Steps from rank 0 down to the farthest rank of the run."""
        self._path: dict[int, list[int]] = {}
        """The way up from each rank below to this one: that rank itself, its leader, the leader's leader and so on."""
        self._under: dict[int, list[int]] = {}
        """The ranks under each leader that is below this rank."""
        for number in parents:
            path = [number, *find_above(number, parents)]
            self.depth = max(self.depth, len(path) - 1)
            if own in path[1:]:
                self._path[number] = path[: path.index(own)]
                for between in self._path[number][1:]:
                    self._under.setdefault(between, []).append(number)
        self._beats = {number: known[number] for number in self._path}
        self._came = {path[-1]: now for path in self._path.values()}
        """Time at which each rank that speaks to this one spoke last."""
        self._digests: dict[int, Digest] = {}
        """The last digest of each rank that speaks to this one."""
        self._silent: dict[int, dict[int, float]] = {}
        """For each rank that speaks to this one: seconds for which the ranks under it were silent, as it last said."""
        self._looked = now
        """Time at which `digest` was last called."""

    def __contains__(self, number: int) -> bool:
        return number in self._path

    def __len__(self) -> int:
        return len(self._path)

    def hear(self, speaker: int, beat: Heartbeat, digest: Digest, each: Mapping[int, PeerState], now: float) -> None:
        """Take what a rank says of itself, of all ranks below it together, and maybe of each of them."""
        self._beats[speaker], self._digests[speaker] = beat, digest
        silent: dict[int, float] = {}
        # There may be thousands of ranks: each is looked at only when there is something to see.
        has_news = bool(each) or digest == ALL_HAVE_ENDED
        under = self._under.get(speaker, []) if has_news else []
        for number in under:
            if number in each:
                silent[number] = each[number].silent_seconds
                if each[number].beat.number >= self._beats[number].number:
                    self._beats[number] = each[number].beat
            elif not each and number not in self._came and self._beats[number].left is None:
                self._beats[number] = self._beats[number]._replace(left=0)
        self._silent[speaker], self._came[speaker] = silent, now

    def knows_each(self) -> bool:
        """Whether each leader that speaks to this rank has told of each rank under it last time, or has ended."""
        speakers = [one for one in list(self._came) if one in self._under]
        return all(self._silent.get(one) or self._beats[one].left is not None for one in speakers)

    def digest(self, now: float, beat_seconds: float) -> Digest:
        """Give the digest of all ranks below this one. To be called at each beat."""
        if now - self._looked > _PAUSE_BEATS * beat_seconds:
            # This process itself was stopped, as in a suspended job: it must first hear the others again.
            self._came = dict.fromkeys(self._came, now)
        self._looked = now
        limit = BEATS_UNTIL_NOTED * beat_seconds
        for speaker, came in list(self._came.items()):
            is_from_further = len(self._path[speaker]) > 1 and now - came > limit
            if is_from_further and self._state(speaker, now, beat_seconds).silent_seconds <= limit:
                # This rank speaks to its own leader again, who says what there is to say: what it said here is old.
                for by_speaker in (self._came, self._digests, self._silent):
                    by_speaker.pop(speaker, None)
        found = []
        for speaker, came in list(self._came.items()):
            found.append(Digest.of(self._state(speaker, now, beat_seconds), beat_seconds))
            if now - came <= limit:
                # What one has noted is judged here: another may have heard that rank since.
                found.append(self._digests.get(speaker, Digest())._replace(is_noted=False))
            for number in list(self._silent.get(speaker, ())):
                is_noted = Digest.of(self._state(number, now, beat_seconds), beat_seconds).is_noted
                found.append(Digest(is_noted=is_noted))
        return Digest.merged(found)

    def states(self, now: float, beat_seconds: float) -> dict[int, PeerState]:
        """Give what is known of each rank below, by rank."""
        return {number: self._state(number, now, beat_seconds) for number in self._path}

    def _state(self, number: int, now: float, beat_seconds: float) -> PeerState:
        """Give what is known of one rank: it is as silent as the one says who has heard it last."""
        seconds = []
        for speaker in self._path[number]:
            came = self._came.get(speaker)
            if came is None:
                continue
            since = now - came
            if speaker != number:
                # A message that is on its way is no silence, or each step of the way would add a beat.
                since = since if since > BEATS_UNTIL_NOTED * beat_seconds else 0.0
                since += self._silent.get(speaker, {}).get(number, 0.0)
            seconds.append(since)
        # Who asks may have taken the time before the newest message came.
        return PeerState(self._beats[number], max(min(seconds), 0.0))
