"""Float8 products of the blocks' linear layers: near float32, beside autocast, with the model's own parameters."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hfdist.config.train import Recompute
from hfdist.errors import ConfigError, ResourceError
from hfdist.models.float8 import use_float8
from hfdist.models.recompute import checkpoint_blocks
from tests.unit.tiny import llama

TOKENS = torch.arange(64).view(2, 32)

torchao_float8 = pytest.importorskip("torchao.float8", exc_type=ImportError)


def step(model, *, autocasts=True, micro_batches=(TOKENS,)):
    """The last loss, and the mean gradients, computed as a run computes them."""
    for tokens in micro_batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = model(input_ids=tokens, labels=tokens).loss
        (loss / len(micro_batches)).backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(ours, reference):
    return max(((ours[name] - value).norm() / value.norm()).item() for name, value in reference.items())


def in_float8(model):
    """Names of the layers that multiply in float8."""
    kind = torchao_float8.float8_linear.Float8Linear
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return llama().train()


def test_losses_and_gradients_are_near_those_of_float32(model):
    rounded, coarse = copy.deepcopy(model), copy.deepcopy(model)
    use_float8(coarse)
    (loss, exact), (_, bf16), (ours, fp8) = step(model, autocasts=False), step(rounded), step(coarse)
    assert ours == pytest.approx(loss, rel=2e-3)
    # Of bfloat16 numbers 2**-9 is lost at the most, of float8 ones 2**-4.
    assert worst(bf16, exact) < 0.02 < 0.04 < worst(fp8, exact) < 0.15
    assert {gradient.dtype for gradient in fp8.values()} == {torch.float32}


def test_gradients_do_not_depend_on_what_shares_a_micro_batch(model):
    """With one scale a tensor they would differ by as much as float8 loses."""
    use_float8(model)
    together, alone = copy.deepcopy(model), model
    (_, reference), (_, ours) = step(together), step(alone, micro_batches=TOKENS.split(1))
    assert worst(ours, reference) < 0.02


def test_what_is_written_is_the_models_own(model, tmp_path):
    parameters = dict(model.named_parameters())
    model.save_pretrained(tmp_path / "before")
    use_float8(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path / "after")
    before, after = ({file.name: file.read_bytes() for file in Path(folder).iterdir()} for folder in
                     (tmp_path / "before", tmp_path / "after"))  # fmt: skip
    assert before == after
    assert in_float8(AutoModelForCausalLM.from_pretrained(tmp_path / "after")) == set()


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, {"lm_head"}),
        ({"intermediate_size": 40}, {"lm_head", "gate_proj", "up_proj", "down_proj"}),
        # As if these two chose experts.
        ({"num_experts": 48}, {"lm_head", "gate_proj", "up_proj"}),
    ],
)
def test_layers_that_are_left_to_autocast(fields, left):
    model = llama(**fields)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    use_float8(model)
    assert {name.rpartition(".")[2] for name in linear - in_float8(model)} == left
    assert torch.isfinite(torch.tensor(step(model)[0]))


@pytest.mark.parametrize("recompute", [*Recompute])
def test_recomputed_blocks_have_the_same_gradients(model, recompute):
    use_float8(model)
    plain, again = copy.deepcopy(model), model
    checkpoint_blocks(again, recompute)
    (loss, reference), (ours, gradients) = step(plain), step(again)
    assert ours == loss
    assert all(torch.equal(gradients[name], value) for name, value in reference.items())


def test_a_model_without_fitting_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="no linear layer") as caught:
        use_float8(model)
    assert caught.value.hint == "train.precision=bf16"


def test_a_gpu_without_float8_is_refused(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ResourceError) as caught:
        use_float8(model)
    assert caught.value.found == "fp8, on NVIDIA A100"
