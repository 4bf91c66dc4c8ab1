"""Weights of 4 bits beside an adapter: as PEFT and transformers have them, and the adapter stands alone."""

import pytest
import torch
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hfdist.config.model import Quantization
from hfdist.errors import ConfigError
from hfdist.models.flops import measure_size
from hfdist.models.quantize import PackedLinear, hold_as_floats, packed_shapes
from tests.unit.test_adapter import TOKENS, base, build, compose, save_adapter, trained_names  # noqa: F401


def gradients(model):
    model.train()
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_losses_and_gradients_are_those_of_peft(base, tmp_path, kind):  # noqa: F811
    ours = build(base, "adapter=lora", "adapter.rank=4", f"adapter.quantization={kind}")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_adapter(ours, tmp_path / "adapter")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    plain = prepare_model_for_kbit_training(plain, use_gradient_checkpointing=False)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    (loss, found), (their_loss, wanted) = gradients(ours), gradients(theirs)
    assert loss == pytest.approx(their_loss, rel=1e-6)
    wanted = {name.removeprefix("base_model.model."): gradient for name, gradient in wanted.items()}
    assert found.keys() == wanted.keys() == set(trained_names(ours))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert loss != pytest.approx(gradients(whole)[0], rel=1e-4), "or nothing was rounded"


def test_frozen_layers_are_packed_and_keep_their_names(base):  # noqa: F811
    plain, packed = build(base, "adapter=lora"), build(base, "adapter=qlora")
    assert [name for name, _ in packed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert trained_names(packed) == trained_names(plain)
    of_parameters = packed_shapes(packed)
    shapes = {name: of_parameters.get(p) for name, p in packed.named_parameters()}
    names = {name for name, shape in shapes.items() if shape is not None}
    assert names == {name for name in shapes if name.endswith("base_layer.weight")}
    assert all(shapes[name] == tuple(plain.get_parameter(name).shape) for name in names)
    assert packed.lm_head.weight.dtype == torch.float32

    def numel(parameter):
        return torch.Size(of_parameters.get(parameter, parameter.shape)).numel()

    assert measure_size(packed, numel) == measure_size(plain)


def test_experts_that_stay_as_they_are_are_named_with_their_share(tmp_path, caplog):
    sizes = {"hidden_size": 32, "vocab_size": 16, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **heads)).save_pretrained(tmp_path)
    model = build(tmp_path, "adapter=qlora", "adapter.targets=[q_proj]")
    [told] = [record for record in caplog.records if "stay as they are" in record.message]
    assert told.levelname == "WARNING"
    frozen = sum(3 * 8 * 32 * 64 + 4 * 32 * 32 for _ in model.model.layers)
    assert "model.layers.*.mlp.experts.gate_up_proj (" in told.message
    assert int(told.message.split("%")[0].split()[-1]) in range(int(100 * 2 * 3 * 8 * 32 * 64 / frozen) - 2, 100)


@pytest.mark.parametrize("sides", [(64, 32), (3, 3)])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_weights_held_as_floats_are_the_same(sides, precision):
    """FSDP2 shards these; those of three rows and columns take 5 bytes, which are not a number of floats."""
    torch.manual_seed(0)
    layer = PackedLinear(torch.nn.Linear(*sides), Quantization.nf4)
    inputs = torch.randn(2, sides[0])
    with torch.no_grad(), torch.autocast("cpu", precision, enabled=precision != torch.float32):
        before = layer(inputs)
        assert before.dtype == precision
        scales = hold_as_floats(layer, "cpu")
        assert layer.weight.dtype == torch.float32
        assert layer.quant_state.absmax.data_ptr() in {tensor.data_ptr() for tensor in scales}
        assert packed_shapes(layer) == {layer.weight: sides[::-1]}
        assert torch.equal(layer(inputs), before)


def test_a_change_of_type_leaves_bytes_and_scales():
    """As DeepSpeed changes a model's in half precision."""
    layer = PackedLinear(torch.nn.Linear(64, 32, bias=False), Quantization.nf4)
    inputs = torch.randn(2, 64)
    before = layer(inputs)
    assert torch.equal(layer.bfloat16()(inputs), before)


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (["adapter.quantization=nf4"], "adapter.quantization", "without an adapter"),
        (["adapter=dora", "adapter.quantization=nf4"], "adapter.quantization", "in 4 bits"),
        (["adapter.type=ia3", "adapter.quantization=nf4"], "adapter.quantization", "in 4 bits"),
        (["adapter=qlora", "strategy=tensor"], "adapter.quantization", "strategy.tensor=1"),
        (["adapter=qlora", "adapter.quantization=nf5"], "adapter.quantization", "nf4"),
    ],
)
def test_what_does_not_go_together_is_told(base, overrides, where, said):  # noqa: F811
    with pytest.raises(ConfigError) as caught:
        compose(base, *overrides)
    assert str(caught.value.where).startswith(where)
    assert said in str(caught.value)
