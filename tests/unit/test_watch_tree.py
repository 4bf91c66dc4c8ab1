"""What rank 0 hears through the tree of the watch is what it would hear of each rank, whatever is lost between them."""

import random

import pytest

from hfdist.watch.diagnosis import find_lost, find_stalled
from hfdist.watch.heartbeat import Heartbeat, PeerState
from hfdist.watch.tree import BEATS_UNTIL_NOTED, Below, Digest, find_above, find_parents

BEAT_SECONDS = 1.0


class Run:
    """Ranks that beat once a second by a clock of their own, without sockets; counts what rank 0 is told."""

    def __init__(self, machines):
        self.now = 100.0
        self.parents = find_parents(machines)
        self.ranks = range(sum(map(len, machines)))
        self.known = [Heartbeat(number=0, host=str(rank)) for rank in self.ranks]
        leaders = {0, *self.parents.values()}
        self.below = {rank: Below(rank, self.known, self.parents, self.now) for rank in leaders}
        self.above = {rank: find_above(rank, self.parents) for rank in self.ranks}
        self.fields = {rank: {} for rank in self.ranks}
        self.lost, self.asks_each = set(), False
        self.messages = self.told_of = 0

    def beat(self, seconds=1):
        """Let all that are not lost speak to the nearest rank above that is there, the deepest first."""
        for _ in range(seconds):
            self.now += BEAT_SECONDS
            # As rank 0 does at least once a beat.
            self.digest()
            for rank in sorted(self.ranks, key=lambda rank: (-len(self.above[rank]), rank)):
                to = next((one for one in self.above[rank] if one not in self.lost), None)
                if rank in self.lost or to is None:
                    continue
                digest, each = Digest(), {}
                if rank in self.below:
                    digest = self.below[rank].digest(self.now, BEAT_SECONDS)
                    if digest.is_noted or self.asks_each:
                        each = self.below[rank].states(self.now, BEAT_SECONDS)
                beat = Heartbeat(number=int(self.now), host=str(rank), **self.fields[rank])
                self.below[to].hear(rank, beat, digest, each, self.now)
                self.messages += to == 0
                self.told_of += (to == 0) * (1 + len(each))

    def digest(self):
        return self.below[0].digest(self.now, BEAT_SECONDS)

    def states(self):
        return {0: PeerState(Heartbeat(number=1))} | self.below[0].states(self.now, BEAT_SECONDS)


def in_machines(count, size):
    return [range(first, first + size) for first in range(0, count * size, size)]


def test_each_rank_has_one_above_it_and_no_rank_has_many_below():
    parents = find_parents(in_machines(2048, 8))
    assert sorted(parents) == list(range(1, 16_384))
    assert [find_above(rank, parents) for rank in (1, 8, 9, 256, 16_383)] == [
        [0], [0], [8, 0], [0], [16_376, 16_128, 8192, 0]]  # fmt: skip
    children = [list(parents.values()).count(rank) for rank in (0, 8, 256, 8192)]
    assert children == [7 + 31 + 31 + 1, 7, 7 + 31, 7 + 31 + 31]


def test_of_thousands_that_are_well_rank_0_hears_little():
    run = Run(in_machines(256, 8))
    run.beat(3)
    assert not run.digest().is_noted
    assert run.digest().num_ranks == 2047
    assert run.messages == run.told_of == 3 * (7 + 31 + 7)


@pytest.mark.parametrize("seed", range(8))
def test_the_lost_ranks_are_found_and_no_others(seed):
    """Leaders too, and whole machines."""
    rng = random.Random(seed)
    machines = in_machines(40, 3)
    run = Run(machines)
    run.beat(2)
    run.lost = set(rng.sample(range(1, 120), rng.choice([1, 2, 5])))
    if seed % 2:
        run.lost |= {0 + 3 * machine + place for machine in rng.sample(range(1, 40), 2) for place in range(3)}
    seconds = 0
    while not run.digest().is_noted:
        run.beat()
        seconds += 1
    assert seconds <= BEATS_UNTIL_NOTED + 2
    run.beat(3)
    states = run.states()
    assert {rank for rank, one in states.items() if one.silent_seconds > 2.5} == run.lost
    line = find_lost(states | {0: PeerState(Heartbeat(number=1, broken_seconds=3.0))}, 60.0).line
    first = min(run.lost)
    assert f"(on {first}, after the start" in line
    assert f" for rank{'s' * (len(run.lost) > 1)} {first}" in line


def test_a_rank_that_all_wait_for_is_named_once_rank_0_has_asked():
    run = Run(in_machines(5, 4))
    for rank in run.ranks:
        run.fields[rank] = {"idle_seconds": 70.0, "marks": 5 - (rank == 14)}
    run.beat(2)
    digest = run.digest()
    assert (digest.is_noted, digest.is_exempt, digest.idle_seconds) == (False, False, 70.0)
    assert not run.below[0].knows_each()
    run.asks_each = True
    run.beat(2)
    assert run.below[0].knows_each()
    states = run.states() | {0: PeerState(Heartbeat(number=1, idle_seconds=70.0, marks=5))}
    assert find_stalled(states, 60.0).line.startswith("ranks 0-13, 15-19 wait for rank 14 (on 14")


def test_one_exempt_rank_or_one_with_progress_is_heard_in_all_that_is_said():
    run = Run(in_machines(5, 4))
    for rank in run.ranks:
        run.fields[rank] = {"idle_seconds": 70.0, "longest_idle_seconds": 1.0}
    run.fields[15] |= {"exempt": "saving", "idle_seconds": 3.0, "longest_idle_seconds": 30.0}
    run.beat(2)
    assert run.digest() == Digest(19, 3.0, 30.0, True, False)


def test_ranks_that_end_with_their_run_are_no_alarm_and_one_with_an_error_is_known():
    run = Run(in_machines(3, 3))
    run.beat(2)
    for rank in (1, 2, 7, 8):
        run.fields[rank] = {"left": 0}
    run.beat()
    assert run.digest() == Digest(4)
    run.fields[5] = {"left": 3}
    run.beat(2)
    assert run.digest().is_noted
    assert run.states()[5].beat.left == 3
    run.fields |= {rank: {"left": 0} for rank in (3, 4, 6)}
    run.beat(2)
    assert run.digest().num_ranks == 0
    assert {one.beat.left for rank, one in run.states().items() if rank > 5} == {0}


def test_after_a_pause_of_all_ranks_nobody_is_silent():
    """A job is suspended: each rank finds that out by itself, before it tells anything."""
    run = Run(in_machines(3, 3))
    run.beat(2)
    run.now += 100
    run.beat()
    assert not run.digest().is_noted
    assert max(one.silent_seconds for one in run.states().values()) < 1


def test_a_rank_that_was_heard_another_way_for_a_while_is_well():
    """Its leader was busy: it spoke to rank 0, and then to its leader again."""
    run = Run(in_machines(3, 3))
    run.beat(2)
    run.lost = {3}
    run.beat(4)
    assert {rank for rank, one in run.states().items() if one.silent_seconds > 2} == {3}
    run.lost = set()
    run.beat(3)
    assert not run.digest().is_noted
    run.lost = {4}
    run.beat(3)
    assert run.digest().is_noted
    assert {rank for rank, one in run.states().items() if one.silent_seconds > 2} == {4}


def test_a_stall_is_found_after_a_leader_was_away_for_a_while():
    """What its machine said to rank 0 itself is old, and hides nothing."""
    run = Run(in_machines(2, 4))
    run.beat(2)
    run.lost = {4}
    run.beat(4)
    run.lost = set()
    run.beat(3)
    for rank in run.ranks:
        run.fields[rank] = {"idle_seconds": 700.0, "longest_idle_seconds": 1.0}
    run.beat(4)
    assert run.digest() == Digest(7, 700.0, 1.0, False, False)


def test_leaders_tell_of_each_after_one_above_them_was_away_for_a_while():
    run = Run(in_machines(40, 2))
    run.beat(2)
    run.lost = {64}
    run.beat(4)
    run.lost = set()
    run.beat(3)
    run.asks_each = True
    run.beat(6)
    assert run.below[0].knows_each()


def test_a_message_that_comes_while_one_asks_is_no_negative_silence():
    below = Below(2, [Heartbeat(number=0)] * 4, find_parents(in_machines(2, 2)), now=0.0)
    below.hear(3, Heartbeat(number=1), Digest(), {}, now=100.01)
    assert below.states(100.0, BEAT_SECONDS)[3].silent_seconds == 0.0
