"""What the parts of a model cost: parameters, operations for one token, or seconds."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.costs import costs_by_flops, costs_by_parameters, costs_by_time, parameters_of
from hfdist.pipeline.partition import partition
from tests.unit.pipeline import toys
from tests.unit.pipeline.toys import make_toy
from tests.zoo.models import tiny_model

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


class Headless(toys.Toy):
    """Its head is no module that the model could name."""

    def get_output_embeddings(self):
        return None


def test_models_without_a_known_head():
    assert parameters(make_toy(Headless)).epilogue == 0
    assert flops(make_toy(Headless)).epilogue == 10 * 32


class Calls(nn.Module):
    """Notes each call of itself and of its copies."""

    shapes: ClassVar = []

    def forward(self, hidden):
        Calls.shapes.append(tuple(hidden.shape))
        return hidden


def times(model):
    return costs_by_time(
        model, find_block_parts(model), torch.zeros(2, 16, dtype=torch.int64), torch.device("cpu"), None
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
