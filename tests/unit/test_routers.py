"""Whose loss over routers is known, by small models of the types."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.models.router_check import check_router_loss
from hfdist.models.routers import Routers, adds_router_loss, find_routers

FIELDS = {"output_router_logits": True, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
          "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def make(kind, **fields):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FIELDS | fields))


def test_the_loss_of_a_type_with_the_common_definition_is_ours():
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    assert len(list(find_routers(model))) == 2
    assert adds_router_loss(model)
    check_router_loss(model)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("doge", {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, "no row of logits"),
        ("llama4_text", {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48}, "adds none"),
    ],
)
def test_another_definition_is_refused(kind, fields, reason):
    with pytest.raises(ConfigError) as refused:
        check_router_loss(make(kind, **fields))
    assert reason in str(refused.value)
    assert "try:     model.config.output_router_logits=false" in str(refused.value)


def test_a_model_without_a_head_adds_no_loss_over_routers():
    with pytest.raises(ConfigError, match="has no head") as refused:
        check_router_loss(make("olmoe", num_experts=4, num_experts_per_tok=2).model)
    assert refused.value.hint == "model.config.output_router_logits=false"


@pytest.mark.parametrize("adds_loss", [False, True])
def test_routers_keep_a_graph_only_for_a_loss(adds_loss):
    # It would hold the activations of blocks that are computed again.
    model = make("qwen3_moe", output_router_logits=adds_loss)
    routers = Routers(model)
    routers.is_watching = True
    model(input_ids=torch.zeros((1, 4), dtype=torch.int64))
    routings = routers.take()
    assert len(routings) == routers.num_layers > 0
    assert all(routing.logits.requires_grad is adds_loss for routing in routings)
