"""What the parts of a model take on this device."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hfdist.config.train import Precision
from hfdist.errors import CheckpointError, ConfigError
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.block_times import time_blocks, time_blocks_of_run
from tests.distributed.trainers import on_ranks
from tests.zoo.models import tiny_model


class Calls(nn.Module):
    """Notes each call of itself and of its copies."""

    shapes: ClassVar = []

    def forward(self, hidden):
        Calls.shapes.append(tuple(hidden.shape))
        return hidden


def times(model, *, halves=False):
    blocks, tokens = find_block_parts(model), torch.zeros(2, 16, dtype=torch.int64)
    return time_blocks(model, blocks, tokens, torch.device("cpu"), None, halves=halves)


@pytest.mark.distributed
@on_ranks(2)
def test_a_rank_without_memory_takes_the_others_along():
    model, is_first = tiny_model("llama", 2), dist.get_rank() == 0

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no room")

    if not is_first:
        model.model.layers[1].forward = fail
        model.model.layers[1].mlp = nn.Identity()
    blocks = find_block_parts(model)
    with pytest.raises(CheckpointError if is_first else torch.OutOfMemoryError, match="no room"):
        time_blocks_of_run(model, blocks, (2, 16), Precision.fp32)


def test_equal_blocks_cost_the_same_and_are_timed_once():
    model = tiny_model("llama", 4)
    Calls.shapes.clear()
    for block in model.model.layers:
        block.input_layernorm = nn.Sequential(Calls(), block.input_layernorm)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    drawn = torch.get_rng_state()
    costs = times(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert len(costs.blocks) == 4
    assert len(set(costs.blocks)) == 1
    assert all(part.seconds > 0 for part in (costs.blocks[0], costs.prologue, costs.epilogue))
    # A first time to warm up and five that count, of one block, with one micro batch.
    assert [shape[:2] for shape in Calls.shapes] == [(2, 16)] * 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None


@pytest.mark.parametrize("kind", ["zamba2", "xlm"])
def test_kinds_of_blocks_are_timed_apart(kind):
    model = tiny_model(kind)
    costs = times(model)
    assert len(costs.blocks) == len(find_block_parts(model))
    assert all(block.seconds > 0 for block in costs.blocks)


def test_halves_are_timed_beside_whole_backwards_with_what_is_kept_for_them():
    model = tiny_model("llama", 2)
    found = times(model, halves=True)
    block, (embedding, head) = found.blocks[0], (found.prologue, found.epilogue)
    assert min(block.input_half, block.weight_half, head.input_half, head.weight_half) > 0
    # No input wants a gradient.
    assert embedding.weight_half > embedding.input_half
    tokens, config = 2 * 16, model.config
    # Inputs of both norms and all matrices, and what is between gate and up.
    least = 4 * tokens * (4 * config.hidden_size + 3 * config.intermediate_size)
    assert least < block.kept_bytes < 5 * least
    # Its input, the logarithms of all probabilities, and targets.
    of_head = 4 * tokens * (config.hidden_size + config.vocab_size)
    assert of_head <= head.kept_bytes < 1.1 * of_head
    assert found.of_blocks(range(2)).kept_bytes == 2 * block.kept_bytes + embedding.kept_bytes + head.kept_bytes
    assert times(model).blocks[0].kept_bytes == 0


@pytest.mark.parametrize(("halves", "hint"), [(False, "strategy.balance=flops"), (True, "strategy.schedule=1f1b")])
def test_blocks_that_need_others_are_not_timed(halves, hint):
    with pytest.raises(ConfigError, match="cannot be timed one by one") as refused:
        times(tiny_model("gemma3n_text"), halves=halves)
    assert refused.value.hint == hint
