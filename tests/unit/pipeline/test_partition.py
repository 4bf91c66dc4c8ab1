"""Stages of even work, checked against all partitions, and what the parts of a model cost."""

from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Balance, StrategyConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, PartitionError
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.block_times import BlockTimes, PartTime
from hfdist.pipeline.costs import Costs, costs_by_flops, costs_by_parameters, parameters_of
from hfdist.pipeline.partition import choose_stages, partition, take_counts
from tests.unit.pipeline import toys
from tests.unit.pipeline.toys import make_toy
from tests.zoo.models import tiny_model


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
    cost = st.integers(0, 20).map(float)
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


def test_too_many_stages_are_refused_with_the_most_that_fit():
    with pytest.raises(PartitionError, match="at most 6 stages") as caught:
        partition(uniform(6), loop(4, 2))
    assert "6 blocks for 8 stages" in str(caught.value)
    with pytest.raises(PartitionError, match="at most 6 stages"):
        take_counts([1] * 8, 6, 8)


def test_explicit_counts_are_taken_as_they_are():
    runs = take_counts([1, 4, 2], 7, 3)
    assert runs == (range(0, 1), range(1, 5), range(5, 7))
    assert [run.stop for run in runs] == list(accumulate([1, 4, 2]))


@pytest.mark.parametrize(
    ("counts", "words"),
    [([3, 4], "one number of blocks is needed for each of the 3 stages"), ([0, 4, 3], "every stage needs a block"),
     ([2, 2, 2], "must hold the 7 blocks"), ([], "one number")],
)  # fmt: skip
def test_wrong_explicit_counts_are_refused_with_numbers_that_fit(counts, words):
    with pytest.raises(ConfigError, match=words) as caught:
        take_counts(counts, 7, 3)
    assert caught.value.where == "strategy.blocks_per_stage"
    assert "3 numbers >= 1 with the sum 7" in str(caught.value)
    assert caught.value.hint.startswith("strategy.blocks_per_stage=[3,2,2]")
    assert take_counts([3, 2, 2], 7, 3)


LENGTH = 64
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 100, "num_hidden_layers": 3}  # fmt: skip


def make(model_type, **config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | config))


def flops(model, length=LENGTH):
    return costs_by_flops(model, find_block_parts(model), length)


def parameters(model):
    return costs_by_parameters(model, find_block_parts(model))


ATTENTION = 2 * 32 * 32 + 2 * 32 * 16
LLAMA_BLOCK = ATTENTION + 3 * 32 * 48 + 2 * 32


@pytest.mark.parametrize("tied", [False, True])
def test_costs_of_a_llama(tied):
    """FLOPs: 6 for each parameter, attention over the whole square, no embedding, a head with its softmax."""
    model = make("llama", tie_word_embeddings=tied)
    held, computed = parameters(model), flops(model)
    assert held.blocks == (LLAMA_BLOCK,) * 3
    assert held.prologue == held.epilogue == 100 * 32
    assert computed.blocks == (6 * LLAMA_BLOCK + 12 * 32 * LENGTH,) * 3
    assert (computed.prologue, computed.epilogue) == (0, 6 * 100 * 32 + 10 * 100)


def test_heads_may_be_wider_than_the_hidden_states():
    narrow, wide = (flops(make("qwen3", head_dim=size)).blocks[0] for size in (8, 32))
    per_size = 32 * 4 + 2 * 32 * 2 + 4 * 32 + 2
    assert wide - narrow == (6 * per_size + 12 * 4 * LENGTH) * (32 - 8)


def test_a_size_that_differs_by_block_is_no_obstacle():
    """transformers raises when it is asked of the whole config."""
    assert all(cost > 0 for cost in flops(tiny_model("gemma4_text")).blocks)


def test_of_the_experts_only_those_count_that_a_token_meets():
    model = make("mixtral", num_local_experts=8, num_experts_per_tok=2)
    expert, router, norms = 3 * 32 * 48, 8 * 32, 2 * 32
    around = ATTENTION + router + norms
    assert parameters(model).blocks[0] == around + 8 * expert
    assert flops(model).blocks[0] == 6 * (around + 2 * expert) + 12 * 32 * LENGTH


def test_shared_experts_and_dense_blocks_count_in_full():
    dense, sparse = flops(
        make(
            "glm4_moe",
            num_hidden_layers=2,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=48,
            head_dim=8,
        )
    ).blocks
    expert, router = 3 * 32 * 48, 4 * 32
    assert sparse - dense == 6 * ((2 + 1) * expert + router - 3 * 32 * 48)


def test_blocks_without_attention_do_not_pay_for_it():
    config = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "conv_L_cache": 3}
    model = make("lfm2", **config)
    short, long = flops(model, 100), flops(model, 300)
    assert [after - before for before, after in zip(short.blocks, long.blocks, strict=True)] == [0, 12 * 32 * 200]


def test_a_block_of_several_modules_is_counted_whole_and_shared_parameters_once():
    model = make_toy(toys.TwoLists)
    linear = 8 * 8 + 8
    assert parameters(model).blocks == (2.0 * linear,) * 4
    block = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    block["b"].weight = block["a"].weight
    assert list(parameters_of((block,))) == ["0.a.weight"]


def test_models_without_a_known_embedding_and_head():
    model = make_toy(toys.Unnamed)
    assert parameters(model).prologue == parameters(model).epilogue == 0
    assert flops(model).epilogue == 10 * 32


def test_a_block_that_takes_longer_moves_the_cut():
    model = make_toy()
    slow, fast = PartTime(forward=2.0, backward=4.0), PartTime(forward=1.0, backward=1.0)
    measured = StrategyConfig(balance=Balance.measured)
    batch = BatchPlan(global_batch_size=1, micro_batch_size=1, num_microbatches=1, data_size=1, sequence_length=16)
    for times, cut in (((slow, fast, fast, fast), 1), ((fast, fast, fast, slow), 3)):
        known = BlockTimes(times, prologue=PartTime(), epilogue=PartTime())
        stages = choose_stages(model, find_block_parts(model), measured, batch, (0, 1), Precision.fp32, known)
        assert stages == (range(cut), range(cut, 4))
