"""Runs that share the lanes of one stream, and come and go: each sequence that counts is read once."""

import functools
import json
import operator
import random

import pytest

from hfdist.config.data import BadRows
from hfdist.data import Cursor, TokenStream
from hfdist.data.order.lane_state import LaneState, Progress
from hfdist.data.order.shares import Shares
from hfdist.data.stream.ledger import Ledger
from hfdist.errors import CheckpointError
from hfdist.islands.data_share import DataShare
from hfdist.verify.audit.exactly_once import Audit
from hfdist.verify.audit.past_run import join_ledgers, read_ledger
from tests.marks import many
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import PACKINGS, memory_config, memory_corpus

LANES, COUNT, BATCH = 12, 3, 4


def test_lanes_of_who_has_left_are_dealt_in_units_and_come_home():
    shares = Shares.at_home(24, 3)
    assert shares.lanes_of(1) == list(range(1, 24, 3))
    alone = shares.dealt([0, 2], 2)
    assert alone.lanes_of(1) == []
    assert [len(alone.lanes_of(run)) for run in (0, 2)] == [12, 12]
    assert set(alone.lanes_of(0)) > set(shares.lanes_of(0))
    # Nothing moves without need.
    assert alone.dealt([0, 2], 2) == alone
    last = alone.dealt([2], 2)
    assert last.lanes_of(2) == list(range(24))
    assert last.dealt([1, 2], 2).lanes_of(1)[:3] == [1, 4, 7]
    assert last.dealt([0, 1, 2], 2).readers == shares.readers


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_each_run_always_has_whole_units(unit):
    choose, shares = random.Random(unit), Shares.at_home(48, 4)
    for _ in range(200):
        there = sorted(choose.sample(range(4), choose.randint(1, 4)))
        shares = shares.dealt(there, unit)
        numbers = [len(shares.lanes_of(run)) for run in range(4)]
        assert sum(numbers) == 48
        assert all((number > 0) == (run in there) and number % unit == 0 for run, number in enumerate(numbers))
        assert Shares.from_json(shares.to_json()) == shares


class Island:
    """One of some runs, all its data ranks in this process."""

    def __init__(self, corpus, config, folder, index, data_size, checkpoint=None):
        self.index, self.data_size, self.folder = index, data_size, folder / f"{index}"
        self.streams = [
            TokenStream(corpus, tokenizer(), config, data_rank=rank, data_size=data_size, run=(index, COUNT))
            for rank in range(data_size)
        ]
        for stream in self.streams:
            stream.ledger = Ledger(self.folder, corpus, BadRows.error)
            if checkpoint is not None:
                stream.load_state_dict(checkpoint[1])
        self.outer = 0 if checkpoint is None else checkpoint[0]
        self.batches = [iter(stream.loader(batch_size=BATCH // data_size)) for stream in self.streams]

    def train(self, steps):
        for _ in range(steps):
            for batches in self.batches:
                next(batches)

    def merged(self):
        return Cursor.merge([Cursor.from_json(stream.state_dict()) for stream in self.streams])

    def shares(self):
        """Of each rank, which all come to a collective together."""
        cursor = self.merged()
        return [DataShare(stream, self.data_size, lambda: cursor, lambda: None) for stream in self.streams]

    def read(self):
        self.save()
        return self.shares()[0].read()

    def save(self):
        for stream in self.streams:
            stream.ledger.flush()
        return self.outer, self.merged().to_json()


def test_a_cursor_of_some_runs_is_read_by_any_other_number_of_them(tmp_path):
    """Lanes have drifted apart, and each goes on where it stands."""
    config = memory_config(tmp_path / "cache", lanes=LANES, weights={"a": 2.0, "b": 1.0})
    corpus = memory_corpus(config)
    islands = [Island(corpus, config, tmp_path, index, 1) for index in range(COUNT)]
    exchange(islands[:2], [], 1)
    for one in islands[:2]:
        one.train(5)
    exchange(islands[:2], [], 2)
    islands[0].train(2)
    saved = islands[0].save()[1]
    counts = {lane: state.sequences for lane, state in Cursor.from_json(saved).lanes.items()}
    assert sum(counts.values()) == (5 + 5 + 2) * BATCH
    assert len(set(counts.values())) > 1

    def read_two_of_each_lane(*run):
        stream = TokenStream(corpus, tokenizer(), config, run=run)
        stream.load_state_dict(saved)
        next(iter(stream.loader(batch_size=2 * len(stream.lanes))))
        return Cursor.from_json(stream.state_dict())

    alone = read_two_of_each_lane(0, 1)
    assert {lane: state.sequences for lane, state in alone.lanes.items()} == {lane: n + 2 for lane, n in counts.items()}
    assert Cursor.from_json(alone.to_json()) == alone
    for run in range(4):
        own = read_two_of_each_lane(run, 4).lanes
        # A lane gives the same sequences to whoever reads it.
        assert all(own[lane] == alone.lanes[lane] for lane in range(run, LANES, 4))
        assert all(own[lane].sequences == counts[lane] for lane in range(LANES) if lane % 4 != run)
    # One of them was not there then.
    islands = [Island(corpus, config, tmp_path, index, 1, (2, saved)) for index in range(COUNT)]
    assert islands[2].streams[0].lanes == []
    for one in islands:
        one.shares()[0].begin(range(COUNT))
        one.train(2)
        assert sum(state.sequences for state in one.merged().lanes.values()) == sum(counts.values()) + 2 * BATCH
    assert islands[2].streams[0].lanes == [2, 5, 8, 11]


def exchange(members, others, outer):
    there = sorted(one.index for one in (*members, *others))
    read = {one.index: one.read() for one in members}
    for one in members:
        for share in one.shares():
            share.deal(read, there)
    for one in others:
        cursor = members[one.index % len(members)].merged().to_json()
        for share in one.shares():
            share.go_on_as(cursor)
    for one in (*members, *others):
        one.outer = outer


@pytest.mark.parametrize("data_size", [1, 2])
@pytest.mark.parametrize("seed", [*range(2), *map(many, range(2, 12))])
def test_whoever_comes_and_goes_each_sequence_that_counts_is_read_once(tmp_path, seed, data_size):
    choose = random.Random(f"{seed} {data_size}")
    packing = choose.choice(PACKINGS)
    config = memory_config(tmp_path / "cache", lanes=LANES, weights={"a": 2.0, "b": 1.0}, packing=packing)
    corpus = memory_corpus(config)
    saved = {}

    def start(index):
        return Island(corpus, config, tmp_path, index, data_size, saved.get(index))

    def begin(islands):
        """Those with the newest weights begin; the others come to their first exchange."""
        newest = max(one.outer for one in islands)
        first = [one for one in islands if one.outer == newest]
        for one in first:
            for share in one.shares():
                share.begin([other.index for other in first])
        return first, [one for one in islands if one.outer < newest]

    members, others = begin([start(index) for index in range(COUNT)])
    for outer in range(1, 25):
        event = choose.random()
        for one in members:
            one.train(choose.randint(1, 3))
            if choose.random() < 0.4:
                saved[one.index] = one.save()
                one.train(1)
        if event < 0.1:
            # The whole job is killed, and goes on from its checkpoints.
            members, others = begin([start(index) for index in range(COUNT)])
            continue
        if event < 0.5 and len(members) > 1:
            members.remove(choose.choice(members))
        gone = set(range(COUNT)) - {one.index for one in (*members, *others)}
        others += [start(index) for index in gone if choose.random() < 0.5]
        exchange(members, others, outer)
        # As `RoundIsland` does.
        saved |= {one.index: one.save() for one in others}
        members, others = sorted([*members, *others], key=lambda one: one.index), []
    last = [one.save()[1] for one in members]
    ledgers = {index: read_ledger(tmp_path / f"{index}", LANES) for index in range(COUNT)}
    cursors = [(25, Cursor.from_json(cursor)) for cursor in last]
    stream = TokenStream(corpus, tokenizer(), config)
    audit = Audit(
        join_ledgers(ledgers, cursors[-1][1]),
        corpus,
        stream.plan,
        cursors,
        identity=stream.identity,
        global_batch_size=COUNT * BATCH,
        takes_turns=False,
    ).check()
    assert audit.passed, str(audit.discrepancies)
    assert audit.num_sequences > 200
    # What is left out on purpose would be missed.
    without = join_ledgers(ledgers | {0: ledgers[1]}, cursors[-1][1])
    assert not Audit(without, corpus, stream.plan, cursors, identity=stream.identity, global_batch_size=COUNT * BATCH,
                     takes_turns=False).check().passed  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("lanes",), float("inf")),
        (("lanes",), 2.9),
        (("places", 0, 0), -1),
        (("shares", "count"), float("inf")),
        (("shares", "lanes", 1, 1), 7),
        (("shares", "lanes", 0, 2, 0, 1), 0.5),
    ],
)
def test_a_damaged_cursor_is_one_message(place, value):
    lanes = {lane: LaneState(5, (Progress(),), 0) for lane in range(4)}
    shares = Shares.at_home(4, 2).counted(0, {0: 4})
    cursor = Cursor(identity="a", contents="b", num_lanes=4, samples=6, lanes=lanes, next_lane=2, shares=shares)
    saved = json.loads(json.dumps(cursor.to_json()))
    assert Cursor.from_json(saved) == cursor
    *path, last = place
    functools.reduce(operator.getitem, path, saved)[last] = value
    with pytest.raises(CheckpointError, match="is damaged"):
        Cursor.from_json(saved)
