"""`adapter.target_parts`: which matrices of every type it reaches; and LoRA of stacked experts beside PEFT's."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from hfdist.config.model import AdapterPart
from hfdist.config.task import Head
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.models.adapter import inject_adapter
from hfdist.models.adapter_parts import aim_at_parts, describe_parts, find_matrices
from hfdist.models.adapter_trial import try_adapter
from hfdist.models.expert_factors import use_factors
from hfdist.models.experts import num_experts
from hfdist.models.packed_weights import packed_shapes
from hfdist.planning.tracing.trace import Trace
from hfdist.strategies.traffic import Phase
from tests.marks import many
from tests.unit.test_adapter import build, compose, logits, save_adapter, shake
from tests.zoo.models import SAMPLE, TYPES, make_model, tiny_batch, tiny_config, tiny_model

ATTENTION, EXPERTS, ROUTERS = AdapterPart.attention, AdapterPart.experts, AdapterPart.routers
UNREACHED = {
    # Raw parameters of a shape of their own.
    "xlnet": {ATTENTION},
    # Stacks that are read past their module.
    "dbrx": {EXPERTS},
    # By its default config it has none.
    "doge": {EXPERTS, ROUTERS},
}


def meant(names, ends):
    """Those names that PEFT takes for what it is to adapt."""
    return {name for name in names if any(name == end or name.endswith(f".{end}") for end in ends)}


@pytest.mark.parametrize("types", [pytest.param({*SAMPLE, *UNREACHED}, id="sample"), many(TYPES, id="every type")])
def test_names_reach_all_matrices_of_a_part_and_nothing_else(types):
    for model_type in types:
        with torch.device("meta"), no_init_weights():
            model = make_model(model_type, tiny_config(model_type, 6))
        matrices = find_matrices(model)
        parts = {matrix.part for matrix in matrices}
        is_mixture = num_experts(model.config.get_text_config()) > 0
        expected = {ATTENTION} | ({EXPERTS, ROUTERS} if is_mixture else set())
        assert expected - parts == UNREACHED.get(model_type, set()), model_type
        assert is_mixture or not parts & {EXPERTS, ROUTERS}, model_type
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for part in parts:
            config = LoraConfig(target_modules=[])
            aim_at_parts(model, config, [part])
            # A layer may be named by its weight.
            reached = meant(modules, config.target_modules) | meant(parameters, config.target_parameters)
            wanted = [matrix.name for matrix in matrices if matrix.part is part]
            assert layers(reached) == layers(wanted), (model_type, part)


def layers(names):
    return {name.removesuffix(".weight") for name in names}


def with_lora(model, parts, **fields):
    config = LoraConfig(r=3, lora_alpha=6, target_modules=[], task_type="CAUSAL_LM", **fields)
    aim_at_parts(model, config, parts)
    inject_adapter(model, config, "default")
    shake(model)
    return model


def step(model):
    model.zero_grad()
    loss = model(**tiny_batch(model)).loss
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Plain; PEFT takes its shared experts for others; transposed, with biases; no gate.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_factors_give_what_peft_does(model_type):
    model = tiny_model(model_type, 3)
    with_lora(model, {matrix.part for matrix in find_matrices(model)})
    loss, gradients = step(model)
    use_factors(model)
    stacks = [module for module in model.modules() if type(module).__name__ == "_FactoredStack"]
    assert len(stacks) == 2 * sum(type(module).__name__.endswith("Experts") for module in model.modules()) > 0
    ours, own_gradients = step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("by_factors", [True, False])
def test_a_linear_layer_scales_its_lora_while_it_adds_it(by_factors):
    model = with_lora(tiny_model("llama", 1), [AdapterPart.mlp])
    layer = model.model.layers[0].mlp.up_proj
    if by_factors:
        use_factors(model)
    x = torch.randn(3, layer.in_features)
    with Trace() as trace:
        product = layer(x)
    # To add two tensors into a third; PEFT's own first reads one and writes it anew.
    assert trace.costs(Phase.forward).moved_bytes / product.nbytes == (3 if by_factors else 5)


@pytest.mark.parametrize("by_factors", [True, False])
def test_the_backward_keeps_no_other_stack_than_the_frozen_ones(by_factors):
    model = with_lora(tiny_model("qwen3_moe", 1), [EXPERTS])
    if by_factors:
        use_factors(model)
    stacks = {
        parameter.shape: parameter.untyped_storage().data_ptr()
        for parameter in model.parameters()
        if parameter.ndim == 3
    }
    kept = []

    def keep(tensor):
        if tensor.ndim == 3 and {tensor.shape, tensor.mT.shape} & stacks.keys():
            kept.append(tensor.untyped_storage().data_ptr() in stacks.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = model(**tiny_batch(model)).loss
    assert kept
    # PEFT's own keeps the sum of the weights and their change.
    assert all(kept) is by_factors


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tiny_model("qwen3_moe", 2).save_pretrained(folder)
    return folder


WORDS = "adapter.target_parts=[attention,experts,routers]"


def test_what_is_kept_opens_in_peft_and_names_are_short(mixture, tmp_path):
    model = build(mixture, "adapter=lora", "adapter.rank=4", WORDS)
    assert describe_parts(model) == (
        "attention 8 matrices, 3,584 parameters; experts 16 matrices, 7,168 parameters; "
        "routers 2 matrices, 544 parameters"
    )
    shake(model)
    save_adapter(model, tmp_path / "adapter")
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture), tmp_path / "adapter")
    kept = opened.peft_config["default"]
    assert set(kept.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(kept.target_parameters) == {"gate_up_proj", "down_proj", "gate.weight"}
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-4, atol=1e-5)
    again = build(mixture, f"adapter.path={tmp_path / 'adapter'}")
    torch.testing.assert_close(logits(again), logits(model))
    merged = opened.merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)


def test_without_the_key_an_adapter_reaches_what_peft_takes_for_linear_layers(mixture):
    assert "experts 16 matrices" in describe_parts(build(mixture, "adapter=lora"))


def test_parts_of_a_dense_model_and_of_one_in_4_bits(mixture, tmp_path):
    tiny_model("llama", 2).save_pretrained(tmp_path)
    assert describe_parts(build(tmp_path, "adapter=lora", "adapter.target_parts=[mlp]")).startswith("mlp 6 matrices, ")
    model = build(mixture, "adapter=qlora", WORDS)
    assert describe_parts(model).startswith("attention 8 matrices")
    # And two stacks of experts a block.
    assert len(packed_shapes(model)) == 8 + 4
    loss, gradients = step(model)
    assert loss.isfinite()
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("adapter=lora", "adapter.target_parts=[attention,experts]"), "adapter.target_parts=[attention]"),
        (("adapter.type=loha", "adapter.target_parts=[routers]"), "no matrices of routers"),
    ],
)
def test_a_part_that_is_not_there_is_refused_before_weights_are_read(tmp_path, words, said):
    tiny_model("llama", 2).config.save_pretrained(tmp_path)
    config = compose(tmp_path, *words)
    architecture = find_architecture(config.model, sequence_length=64)
    with pytest.raises(ConfigError) as caught:
        try_adapter(config.model, architecture, config.adapter)
    assert caught.value.where == "adapter.target_parts"
    assert said in str(caught.value)


@pytest.mark.parametrize(("words", "said"), [(("adapter.type=loha",), "only LoRA"), (("adapter=dora",), "use_dora")])
def test_what_peft_cannot_put_beside_experts_is_refused_before_weights_are_read(mixture, words, said):
    config = compose(mixture, *words, "adapter.target_parts=[experts]")
    architecture = find_architecture(config.model, sequence_length=64)
    with pytest.raises(ConfigError, match=said):
        try_adapter(config.model, architecture, config.adapter)


def test_parts_are_found_for_what_needs_values_and_for_models_that_score(mixture):
    scoring = ("adapter=lora", "adapter.modules_to_save=[score]")
    for words, head in ((("adapter.type=boft",), Head.tokens), (scoring, Head.score)):
        config = compose(mixture, *words, "adapter.target_parts=[attention]")
        architecture = find_architecture(config.model, sequence_length=64, head=head)
        try_adapter(config.model, architecture, config.adapter, head=head)


def test_another_way_to_compute_experts_does_not_leave_lora_out(mixture):
    model = build(mixture, "adapter=lora", WORDS)
    shake(model)
    loss, gradients = step(model)
    model.set_experts_implementation("batched_mm")
    other_loss, others = step(model)
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=0)
    assert others.keys() == gradients.keys()
