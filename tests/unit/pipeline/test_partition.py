"""Stages of even work, checked against trying all partitions."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.errors import ConfigError, PartitionError
from hfdist.pipeline.costs import Costs
from hfdist.pipeline.partition import explicit, partition


def loop(num_ranks, stages_per_rank):
    return tuple(range(num_ranks)) * stages_per_rank


def v_shape(num_ranks):
    return (*range(num_ranks), *reversed(range(num_ranks)))


def largest(costs, rank_of_stage, runs):
    """Load of the most loaded rank, and of the most loaded stage."""
    stages = [sum(costs.blocks[block] for block in run) for run in runs]
    stages[0] += costs.prologue
    stages[-1] += costs.epilogue
    ranks = dict.fromkeys(rank_of_stage, 0.0)
    for rank, cost in zip(rank_of_stage, stages, strict=True):
        ranks[rank] += cost
    return max(ranks.values()), max(stages)


def every_partition(num_blocks, num_stages):
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(range(start, end) for start, end in pairwise((0, *inner, num_blocks)))


def lengths(runs):
    return [len(run) for run in runs]


def uniform(num_blocks, *, prologue=0.0, epilogue=0.0):
    return Costs(blocks=(1.0,) * num_blocks, prologue=prologue, epilogue=epilogue)


placements = st.one_of(
    st.integers(1, 6).map(lambda num_ranks: loop(num_ranks, 1)),
    st.integers(1, 3).map(v_shape),
    st.sampled_from([loop(2, 2), loop(3, 2), loop(2, 3), loop(1, 4)]),
)


@st.composite
def problems(draw):
    rank_of_stage = draw(placements)
    # Whole numbers, so that sums are exact in whatever order they are taken.
    cost = st.integers(1, 20).map(float)
    blocks = draw(st.lists(cost, min_size=len(rank_of_stage), max_size=10))
    ends = st.integers(0, 60).map(float)
    return Costs(blocks=tuple(blocks), prologue=draw(ends), epilogue=draw(ends)), rank_of_stage


@settings(max_examples=200, deadline=None)
@given(problems())
def test_no_other_partition_is_better(problem):
    """With one stage a rank; with several a search that follows improvements may miss the best by a little."""
    costs, rank_of_stage = problem
    runs = partition(costs, rank_of_stage)
    assert [block for run in runs for block in run] == list(range(len(costs.blocks)))
    assert min(lengths(runs)) >= 1
    best = min(largest(costs, rank_of_stage, other) for other in every_partition(len(costs.blocks), len(rank_of_stage)))
    found = largest(costs, rank_of_stage, runs)
    if len(set(rank_of_stage)) == len(rank_of_stage):
        assert found == best
    else:
        assert found[0] <= best[0] + max(costs.blocks)


def test_uneven_numbers_of_blocks_differ_by_one():
    assert sorted(lengths(partition(uniform(10), loop(4, 1)))) == [2, 2, 3, 3]
    assert sorted(lengths(partition(uniform(30), v_shape(4)))) == [3, 3, 4, 4, 4, 4, 4, 4]
    assert sorted(lengths(partition(uniform(30), loop(4, 2)))) == [3, 3, 4, 4, 4, 4, 4, 4]


def test_a_head_with_a_large_vocabulary_takes_blocks_off_its_rank():
    """The head costs as much as 5 blocks: 35 in all, so that the best of 4 ranks is 9."""
    costs = uniform(30, epilogue=5.0)
    runs = partition(costs, loop(4, 1))
    assert largest(costs, loop(4, 1), runs) == (9.0, 9.0)
    assert len(runs[-1]) <= 4
    # In a V the head comes back to the first rank.
    runs = partition(costs, v_shape(4))
    assert largest(costs, v_shape(4), runs) == (9.0, 6.0)
    assert len(runs[-1]) == 1
    assert len(runs[0]) <= 3


def test_a_head_heavier_than_any_share_gets_one_block_and_the_rest_is_even():
    assert lengths(partition(uniform(13, epilogue=20.0), loop(4, 1))) == [4, 4, 4, 1]
    runs = partition(uniform(128, epilogue=12.0), loop(16, 2))
    assert len(runs[-1]) == 1
    assert max(lengths(runs)) <= 6


@pytest.mark.parametrize("rank_of_stage", [loop(32, 1), loop(16, 2), v_shape(16)])
def test_deep_models_are_partitioned_the_same_each_time(rank_of_stage):
    """128 blocks of two kinds on 32 stages: within one block of an even share."""
    costs = Costs(blocks=(3.0, 3.0, 3.0, 5.0) * 32, prologue=1.0, epilogue=7.0)
    runs = partition(costs, rank_of_stage)
    assert runs == partition(costs, rank_of_stage)
    average = (sum(costs.blocks) + 8.0) / len(set(rank_of_stage))
    assert largest(costs, rank_of_stage, runs)[0] <= average + 3.0


def test_costs_may_be_measured_seconds():
    blocks = tuple(1e-3 * (1 + (37 * i % 101) / 300) for i in range(48))
    costs = Costs(blocks=blocks, prologue=2e-4, epilogue=3e-3)
    for rank_of_stage in (loop(8, 1), v_shape(4), loop(4, 2)):
        share = (sum(blocks) + 3.2e-3) / len(set(rank_of_stage))
        assert largest(costs, rank_of_stage, partition(costs, rank_of_stage))[0] < share + max(blocks)


def test_blocks_that_cost_nothing_are_given_out_all_the_same():
    costs = Costs(blocks=(0.0,) * 5, prologue=1.0, epilogue=2.0)
    for rank_of_stage in (loop(3, 1), v_shape(2), loop(2, 2)):
        runs = partition(costs, rank_of_stage)
        assert min(lengths(runs)) >= 1
        assert sum(lengths(runs)) == 5


def test_too_many_stages_are_refused_with_the_most_that_fit():
    with pytest.raises(PartitionError, match="at most 6 stages") as caught:
        partition(uniform(6), loop(4, 2))
    assert "6 blocks for 8 stages" in str(caught.value)
    with pytest.raises(PartitionError, match="at most 6 stages"):
        explicit([1] * 8, 6, 8)


def test_explicit_counts_are_taken_as_they_are():
    runs = explicit([1, 4, 2], 7, 3)
    assert runs == (range(0, 1), range(1, 5), range(5, 7))
    assert [run.stop for run in runs] == list(accumulate([1, 4, 2]))


@pytest.mark.parametrize(
    ("counts", "words"),
    [([3, 4], "one number of blocks is needed for each of the 3 stages"), ([0, 4, 3], "every stage needs a block"),
     ([2, 2, 2], "must hold the 7 blocks"), ([], "one number")],
)  # fmt: skip
def test_wrong_explicit_counts_are_refused_with_numbers_that_fit(counts, words):
    with pytest.raises(ConfigError, match=words) as caught:
        explicit(counts, 7, 3)
    assert caught.value.where == "strategy.blocks_per_stage"
    assert "3 numbers >= 1 with the sum 7" in str(caught.value)
    assert caught.value.hint.startswith("strategy.blocks_per_stage=[3,2,2]")
    assert explicit([3, 2, 2], 7, 3)
