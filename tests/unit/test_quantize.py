"""Weights of 4 bits beside an adapter: as PEFT and transformers have them, and the adapter stands alone."""

import math
from pathlib import Path

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hfdist.config.model import Quantization
from hfdist.errors import ConfigError
from hfdist.models.flops import measure_size
from hfdist.models.packed_experts import PackedStack, make_levels
from hfdist.models.packed_weights import PackedLinear, hold_as_floats, packed_shapes
from hfdist.models.quantize import quantize_frozen
from tests.distributed.trainers import on_ranks
from tests.unit.test_adapter import TOKENS, base, build, compose, save_adapter, trained_names  # noqa: F401
from tests.zoo.models import tiny_model
from tests.zoo.packing import dequantize_stack


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


def test_a_file_of_weights_does_not_stay_in_memory(base):  # noqa: F811
    def maps():
        return sum(str(base) in line for line in Path("/proc/self/maps").read_text().splitlines())

    plain = build(base, "adapter=lora")
    before = maps()
    packed = build(base, "adapter=qlora")
    assert before == maps() > 0
    del plain, packed


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


SIZES = {"hidden_size": 32, "vocab_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip
EXPERTS = SIZES | {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16}


def save_experts(folder, model_type="qwen3_moe", **sizes):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes or EXPERTS))).save_pretrained(folder)


def test_experts_are_packed(tmp_path, caplog):
    save_experts(tmp_path)
    caplog.set_level("INFO")
    model = build(tmp_path, "adapter=qlora", "adapter.targets=[q_proj]")
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.uint8
    numel = 8 * 3 * 32 * 64
    assert experts.gate_up_proj.nbytes + experts.down_proj.nbytes < 0.53 * numel
    assert packed_shapes(model)[experts.down_proj] == (8, 32, 64)
    [told] = [record for record in caplog.records if "stay as they are" in record.message]
    assert told.levelname == "INFO"
    assert "experts." not in told.message


def test_experts_that_stay_as_they_are_are_named_with_their_share(tmp_path, caplog):
    """Their class computes them by itself."""
    save_experts(tmp_path, "jetmoe", **SIZES, intermediate_size=64, num_local_experts=8, kv_channels=16)
    model = build(tmp_path, "adapter=qlora", "adapter.targets=[kv_proj]")
    [told] = [record for record in caplog.records if "stay as they are" in record.message]
    assert told.levelname == "WARNING"
    assert "model.layers.*.mlp.input_linear.weight (" in told.message
    packed = sum(math.prod(shape) for shape in packed_shapes(model).values())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad and p.dtype != torch.uint8) + packed
    assert int(told.message.split("%")[0].split()[-1]) == round(100 * (1 - packed / frozen))


@pytest.mark.distributed
@on_ranks(2)
def test_ranks_refuse_together():
    """A stage without a layer of its own goes on with the others."""
    model = tiny_model("llama", 1).requires_grad_(False)
    if dist.get_rank():
        model.model.layers = nn.ModuleList()
    quantize_frozen(model, Quantization.nf4)
    model.model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match="no frozen linear layer"):
        quantize_frozen(model, Quantization.nf4)


def test_layers_whose_weight_the_model_reads_stay(tmp_path):
    """Its indexer brings hidden states to the type of this weight: of bytes, they would be whole numbers."""
    model = tiny_model("deepseek_v32").requires_grad_(False)
    quantize_frozen(model, Quantization.nf4)
    indexer = model.model.layers[0].self_attn.indexer
    assert indexer.weights_proj.weight.dtype == torch.float32
    assert isinstance(indexer.wk, PackedLinear)


@pytest.mark.parametrize("shape", [(4, 64, 32), (2, 128, 256), (3, 5, 7), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", list(Quantization))
@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it has no kernel for: nine seconds
def test_a_stack_is_packed_as_bitsandbytes_packs_each_expert(shape, kind):
    torch.manual_seed(0)
    weights = torch.randn(shape)
    expected = []
    for expert in weights:
        codes, state = bitsandbytes.functional.quantize_4bit(expert, compress_statistics=True, quant_type=kind.value)
        expected.append(bitsandbytes.functional.dequantize_4bit(codes, state))
    stack = PackedStack(shape, torch.float32, kind, make_levels())
    packed = stack.pack(weights)
    assert torch.equal(dequantize_stack(stack, packed), torch.stack(expected))
    # Whatever share of the experts a rank holds.
    own = PackedStack((1, *shape[1:]), torch.float32, kind, make_levels())
    assert torch.equal(dequantize_stack(own, packed[1:2]), expected[1][None])


def test_autograd_keeps_no_dequantized_stack(tmp_path):
    save_experts(tmp_path)
    model = build(tmp_path, "adapter=qlora", "adapter.targets=[q_proj]")
    experts, kept = model.model.layers[0].mlp.experts, []
    hidden = torch.randn(2, 32, requires_grad=True)
    chosen = torch.tensor([[0, 1], [1, 2]])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
        output = experts(hidden, chosen, torch.rand(2, 2))
    # Rows of tokens alone: a single expert has eight times as many weights.
    assert 0 < max(tensor.numel() for tensor in kept) <= 4 * 2 * 64
    output.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_stacks_held_as_floats_are_the_same(tmp_path):
    save_experts(tmp_path)
    model = build(tmp_path, "adapter=qlora", "adapter.targets=[q_proj]").eval()
    shapes = list(packed_shapes(model).values())
    with torch.no_grad():
        before = model(torch.arange(16)[None]).logits
        hold_as_floats(model, "cpu")
        assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.float32
        assert list(packed_shapes(model).values()) == shapes
        assert torch.equal(model(torch.arange(16)[None]).logits, before)


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
