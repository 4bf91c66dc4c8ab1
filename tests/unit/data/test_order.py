"""The order of documents: a bijection, dealt to lanes, visited exactly once an epoch."""

import collections
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order.mixture import Mixture, stride_schedule
from hfdist.data.order.runs import Runs
from hfdist.data.order.shuffle import LaneOrder, permutation
from hfdist.data.stream.token_stream import workers_that_fit


@given(size=st.integers(0, 3000), key=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_a_permutation_is_a_bijection(size, key):
    assert sorted(permutation(size, key).tolist()) == list(range(size))


def test_a_permutation_depends_on_its_key_and_mixes():
    size = 10_000
    first, second = (permutation(size, key) for key in (1, 2))
    assert (first == second).mean() < 0.01
    # A random permutation moves an index by a third of the size on average.
    assert np.abs(first - np.arange(size)).mean() / size == pytest.approx(1 / 3, abs=0.02)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


def lane_order(*shards, lanes, key=0):
    return LaneOrder(Runs.of(shards), lanes=lanes, key=(key,))


def neighbours(order, epoch, lane, position):
    """From a position to the end of its block."""
    return order.rest_of_blocks(epoch, lane, position, 1).tolist()


def lane_documents(order, epoch, lane):
    """One by one."""
    return [neighbours(order, epoch, lane, position)[0] for position in range(order.lane_length(epoch, lane))]


shards = st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=5)


@given(
    shards=shards,
    lanes=st.integers(1, 12),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
    least_rows=st.integers(1, 60),
)
@settings(max_examples=40, deadline=None)
def test_each_epoch_visits_each_document_once_and_neighbours_lie_in_one_run(shards, lanes, seed, epoch, least_rows):
    order = lane_order(*shards, lanes=lanes, key=seed)
    one_by_one = [lane_documents(order, epoch, lane) for lane in range(lanes)]
    assert sorted(chain.from_iterable(one_by_one)) == list(range(sum(map(sum, shards))))
    assert [order.documents(epoch, lane).tolist() for lane in range(lanes)] == one_by_one
    if sum(map(sum, shards)) >= lanes:
        assert all(one_by_one)
    ends = np.cumsum(list(chain.from_iterable(shards)))
    for lane, documents in enumerate(one_by_one):
        begins = {0, *(at + 1 for at in range(len(documents)) if len(neighbours(order, epoch, lane, at)) == 1)}
        for position in range(len(documents)):
            together = neighbours(order, epoch, lane, position)
            assert together == documents[position : position + len(together)]
            assert len(set(np.searchsorted(ends, together, side="right").tolist())) == 1
            several = order.rest_of_blocks(epoch, lane, position, least_rows).tolist()
            assert several == documents[position : position + len(several)]
            # Whole blocks, and no more than it takes.
            stop = position + len(several)
            assert stop in begins
            assert stop == len(documents) or len(several) >= least_rows
            assert max(begin for begin in begins if begin < stop) < position + least_rows
    moved = LaneOrder(Runs.of(shards), lanes=lanes, key=(seed,), first_document=100)
    assert moved.documents(epoch, 0).tolist() == [100 + number for number in one_by_one[0]]


def test_epochs_and_seeds_differ():
    def lane(seed, epoch):
        return lane_order([500], lanes=4, key=seed).documents(epoch, 0).tolist()

    assert lane(0, 0) == lane(0, 0)
    assert lane(0, 0) != lane(0, 1)
    assert lane(0, 0) != lane(1, 0)


def test_blocks_lie_inside_their_run_and_lanes_are_as_long_as_each_other():
    order = lane_order([100, 7], [1000], lanes=4)
    lengths = [order.lane_length(0, lane) for lane in range(4)]
    assert sum(lengths) == 1107
    assert max(lengths) - min(lengths) < 1107 / 16
    # A million rows in one run: at most 1,024 are read together.
    large = lane_order([1_000_000], lanes=4)
    assert max(len(neighbours(large, 0, lane, 0)) for lane in range(4)) == 1024


class TestLargeCorpora:
    """Ten million rows: a hundred shards of a hundred row groups."""

    @pytest.fixture
    def order(self):
        return lane_order(*([[1000] * 100] * 100), lanes=8)

    def test_a_lane_stays_in_its_share_of_the_shards_and_in_few_at_a_time(self, order):
        documents = order.documents(0, 3)
        assert len(documents) == 10_000_000 / 8
        assert len(set((documents // 100_000).tolist())) <= 100 / 8 + 2
        assert max(len(set(part // 100_000)) for part in np.array_split(documents, 20)) <= 3


def test_workers_own_whole_lanes():
    assert [workers_that_fit(n, 12) for n in (0, 1, 2, 3, 5, 8, 20)] == [0, 1, 2, 3, 4, 6, 12]
    assert workers_that_fit(3, 7) == 1


weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@given(weights=weights, start=st.integers(0, 10**7), length=st.integers(1, 3000))
@settings(max_examples=150, deadline=None)
def test_the_schedule_is_the_same_from_everywhere_and_exact_in_every_window(weights, start, length):
    turns = stride_schedule(weights, start, start + length)
    middle = length // 2
    assert np.array_equal(turns[middle:], stride_schedule(weights, start + middle, start + length))
    shares = np.array(weights) / sum(weights)
    taken = np.vstack([np.zeros(len(weights)), np.cumsum(np.eye(len(weights))[turns], axis=0)])
    error = taken - np.arange(length + 1)[:, None] * shares
    # Of any window inside: the difference of two such errors. Two sequences for two sources.
    assert (error.max(axis=0) - error.min(axis=0) <= 1 + shares * len(shares) + 1e-6).all()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.618, 0.382), (0.96, 0.04)])
@pytest.mark.parametrize("lanes", [1, 12, 48])
def test_whole_rounds_are_exact_and_every_lane_meets_every_source(shares, lanes):
    mixture = Mixture([(0, shares)], lanes=lanes)
    available = tuple(range(len(shares)))
    rounds = 500
    picks = np.array([mixture.pick(sample, available) for sample in range(rounds * lanes)])
    taken = np.eye(len(shares))[picks].reshape(rounds, lanes, -1)
    error = np.cumsum(taken.sum(axis=1), axis=0) - np.arange(1, rounds + 1)[:, None] * lanes * np.array(shares)
    assert np.abs(error).max() < 2
    by_lane = taken.sum(axis=0) / rounds
    # Rotations are drawn, so that no weight goes along with them.
    assert np.abs(by_lane - np.array(shares)).max() < 0.08


def test_weights_change_at_their_sample_and_zero_pauses():
    mixture = Mixture([(0, (1.0, 1.0)), (120, (1.0, 0.0)), (240, (0.0, 3.0))], lanes=12)
    picks = [mixture.pick(sample, (0, 1)) for sample in range(360)]
    assert sum(picks[:120]) == 60
    assert picks[120:] == [0] * 120 + [1] * 120


def test_paused_sources_are_drawn_from_only_where_nothing_else_is_left():
    mixture = Mixture([(0, (1.0, 1.0, 1.0)), (12, (1.0, 0.0, 0.0))], lanes=12)
    assert {mixture.pick(sample, (0, 1, 2)) for sample in range(12, 240)} == {0}
    assert collections.Counter(mixture.pick(sample, (1, 2)) for sample in range(12, 252)) == {1: 120, 2: 120}
    assert mixture.pick(130, (1,)) == 1


def test_the_share_of_a_finished_source_goes_to_the_others_in_proportion():
    mixture = Mixture([(0, (0.5, 0.3, 0.2))], lanes=1)
    picks = [mixture.pick(sample, (1, 2)) for sample in range(1000)]
    assert picks.count(1) == pytest.approx(600, abs=2)
    assert set(picks) == {1, 2}
    assert mixture.pick(0, ()) is None
