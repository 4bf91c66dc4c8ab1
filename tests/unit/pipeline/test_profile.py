"""Blocks are timed with the arguments that their model gives them, and equal ones once."""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn

from hfdist.errors import ConfigError
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.partitioning.partition import partition
from hfdist.pipeline.partitioning.profile import costs_by_time
from tests.zoo.models import tiny_model

CPU = torch.device("cpu")


class Calls(nn.Module):
    """Notes each call of itself and of its copies."""

    shapes: ClassVar = []

    def forward(self, hidden):
        Calls.shapes.append(tuple(hidden.shape))
        return hidden


def times(model, **more):
    return costs_by_time(
        model, find_block_parts(model), torch.zeros(2, 16, dtype=torch.int64), CPU, nullcontext, **more
    )


def test_equal_blocks_cost_the_same_and_are_timed_once():
    model = tiny_model("llama", 4)
    Calls.shapes.clear()
    for block in model.model.layers:
        block.input_layernorm = nn.Sequential(Calls(), block.input_layernorm)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    costs = times(model)
    assert len(costs.blocks) == 4
    assert len(set(costs.blocks)) == 1
    assert costs.blocks[0] > 0
    assert costs.prologue > 0
    assert costs.epilogue > 0
    # A first time to warm up and five that count, of one block, with one micro batch.
    assert [shape[:2] for shape in Calls.shapes] == [(2, 16)] * 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None


@pytest.mark.parametrize("kind", ["gpt2", "zamba2", "mixtral", "xlm"])
def test_kinds_of_blocks_are_timed_apart(kind):
    model = tiny_model(kind)
    costs = times(model)
    assert len(costs.blocks) == len(find_block_parts(model))
    assert all(seconds > 0 for seconds in costs.blocks)


def test_a_block_of_more_work_moves_the_cut():
    model = tiny_model("llama", 6)
    hidden = model.config.hidden_size
    model.model.layers[0].mlp = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(200)))
    first, second = partition(times(model), (0, 1))
    assert len(first) < len(second)


def test_blocks_that_need_others_are_not_timed():
    with pytest.raises(ConfigError, match="cannot be timed one by one") as refused:
        times(tiny_model("gemma3n_text"))
    assert refused.value.hint == "strategy.balance=flops"
