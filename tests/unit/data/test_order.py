"""The order of documents: a bijection, dealt to lanes, visited exactly once an epoch."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order import LaneOrder, Permutation, block_sizes, lanes_of_rank, workers_that_fit


@given(size=st.integers(1, 3000), key=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_a_permutation_is_a_bijection(size, key):
    image = Permutation(size, key)(np.arange(size))
    assert sorted(image.tolist()) == list(range(size))


def test_a_permutation_depends_on_its_key_and_mixes():
    size = 10_000
    first, second = (Permutation(size, key)(np.arange(size)) for key in (1, 2))
    assert (first == second).mean() < 0.01
    # A random permutation moves an index by a third of the size on average.
    assert np.abs(first - np.arange(size)).mean() / size == pytest.approx(1 / 3, abs=0.02)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


def test_one_index_and_many_agree():
    permutation = Permutation(1000, "x", 3)
    assert [permutation.at(i) for i in range(50)] == permutation(np.arange(50)).tolist()


@given(
    runs=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    lanes=st.integers(1, 12),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_each_epoch_of_the_lanes_visits_each_document_once(runs, lanes, seed, epoch):
    order = LaneOrder(block_sizes(runs, lanes=lanes), lanes=lanes, seed=seed)
    seen = collections.Counter(
        order.document(epoch, lane, position)
        for lane in range(lanes)
        for position in range(order.lane_length(epoch, lane))
    )
    assert seen == dict.fromkeys(range(sum(runs)), 1)


def test_epochs_and_seeds_differ():
    def lane(seed, epoch):
        order = LaneOrder(block_sizes([500], lanes=4), lanes=4, seed=seed)
        return [order.document(epoch, 0, position) for position in range(order.lane_length(epoch, 0))]

    assert lane(0, 0) == lane(0, 0)
    assert lane(0, 0) != lane(0, 1)
    assert lane(0, 0) != lane(1, 0)


def test_blocks_stay_inside_their_run_and_are_many():
    sizes = block_sizes([100, 7, 1000], lanes=4)
    assert sum(sizes) == 1107
    ends = np.cumsum(sizes)
    assert {100, 107, 1107} <= set(ends.tolist())
    assert len(sizes) >= 4 * 16
    # A million rows in one run: blocks are at most 1,024 rows.
    assert max(block_sizes([1_000_000], lanes=4)) == 1024


def test_each_lane_has_a_document_where_there_are_as_many():
    for documents in (12, 13, 40):
        order = LaneOrder(block_sizes([documents], lanes=12), lanes=12, seed=0)
        assert all(order.lane_length(epoch, lane) >= 1 for epoch in range(3) for lane in range(12))


@pytest.mark.parametrize("data_size", [1, 2, 3, 4, 6, 12])
def test_ranks_share_the_lanes(data_size):
    served = [lanes_of_rank(rank, data_size, 12) for rank in range(data_size)]
    assert sorted(lane for lanes in served for lane in lanes) == list(range(12))
    # Sequence i of the run comes from lane i mod lanes, wherever it is read.
    for sample in range(48):
        rank, local = sample % data_size, sample // data_size
        assert served[rank][local % len(served[rank])] == sample % 12


def test_workers_own_whole_lanes():
    assert [workers_that_fit(n, 12) for n in (0, 1, 2, 3, 5, 8, 20)] == [0, 1, 2, 3, 4, 6, 12]
    assert workers_that_fit(3, 7) == 1
