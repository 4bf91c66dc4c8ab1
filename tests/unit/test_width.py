"""`optimizer.base_width`: which parameters are hidden matrices, their rate, and which optimizers fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.models.shrink import shrink
from hfdist.optim.probe import ignores_gradient_size
from hfdist.optim.registry import check_optimizer
from hfdist.optim.width import hidden_matrices, rate_factor, scale_rates

LLAMA = AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
)
OF_LLAMA = {f"model.layers.0.{name}.weight" for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj")}  # fmt: skip


def found(model):
    ids = hidden_matrices(model, lambda parameter: tuple(parameter.shape))
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in ids}


@pytest.mark.parametrize("is_tied", [False, True])
def test_of_a_llama_the_matrices_of_blocks_are_hidden(is_tied):
    LLAMA.tie_word_embeddings = is_tied
    assert found(AutoModelForCausalLM.from_config(LLAMA)) == OF_LLAMA


def test_a_head_for_scores_is_none_of_them():
    assert found(AutoModelForSequenceClassification.from_config(LLAMA)) == OF_LLAMA


def test_embeddings_of_positions_are_none_of_them():
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    blocks = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found(AutoModelForCausalLM.from_config(gpt2)) == {f"transformer.h.0.{name}.weight" for name in blocks}
    assert rate_factor(gpt2, 8) == 0.25


def test_biases_of_experts_are_none_of_them():
    names = found(AutoModelForCausalLM.from_config(shrink(AutoConfig.for_model("gpt_oss"), num_blocks=1)))
    assert {name for name in names if "experts" in name} == {
        f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }
    assert not [name for name in names if name.endswith("bias")]


def test_a_model_that_does_not_say_its_width_is_refused():
    config = SimpleNamespace(model_type="odd", get_text_config=lambda: SimpleNamespace())
    with pytest.raises(ConfigError, match="odd, without hidden_size"):
        rate_factor(config, 8)


def test_scaled_groups_come_after_the_others_with_all_their_settings():
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    groups = [{"params": weights[:2], "weight_decay": 0.5}, {"params": weights[2:], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scale_rates(optimizer, {id(weights[0]), id(weights[3])}, 0.25)
    own = [(group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert [(rate, decay) for _, rate, decay in own] == [(0.1, 0.5), (0.2, 0.01), (0.025, 0.5), (0.05, 0.01)]
    assert [[parameter is weights[place] for parameter in params] for (params, *_), place in zip(own, (1, 2, 0, 3),
            strict=True)] == [[True]] * 4  # fmt: skip


def test_whether_a_step_grows_with_the_gradients_is_asked():
    weight = [nn.Parameter(torch.ones(2))]
    assert ignores_gradient_size(torch.optim.AdamW(weight, lr=1e-3))
    assert ignores_gradient_size(torch.optim.RMSprop(weight, lr=1e-3))
    assert not ignores_gradient_size(torch.optim.SGD(weight, lr=1e-3, momentum=0.9))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sgd", "SGD: its step grows with the gradients"),
        ("muon", "Muon and AdamW: it does not take flat pieces"),
        ("adafactor", "Adafactor: the update of an element depends on the rest of its parameter"),
    ],
)
def test_optimizers_of_another_rule_are_refused(name, why):
    check_optimizer(compose_config(["model=tiny", f"optimizer.name={name}"]))
    with pytest.raises(ConfigError) as caught:
        check_optimizer(compose_config(["model=tiny", f"optimizer.name={name}", "optimizer.base_width=32"]))
    assert why in caught.value.found
    assert caught.value.hint == "optimizer.base_width=null"


@pytest.mark.parametrize("own", [["optimizer.name=rmsprop"], ["optimizer.arguments={amsgrad: true}"]])
def test_relatives_of_adam_fit(own):
    check_optimizer(compose_config(["model=tiny", "optimizer.base_width=32", *own]))
