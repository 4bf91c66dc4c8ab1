"""The names in a model's files are those of the model, or the run says so; what is missing is drawn where it may be."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.config.task import Head
from hfdist.errors import ConfigError
from hfdist.models import TrainableParameters, build_model, check_weights, find_architecture
from tests.unit.test_initialize import TINY

BIAS = {"attention_bias": True, "tie_word_embeddings": False}


def make(folder, kind="llama", dtype=torch.float32, auto=AutoModelForCausalLM, **fields):
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(kind, **TINY[kind] | fields)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # No bias is zero, no norm is one, as nothing new is.
            parameter += 0.25
    model.save_pretrained(folder)
    return model


def rename(folder, change):
    """Save the weights under what `change` makes of their names; None: without them."""
    file = folder / "model.safetensors"
    weights = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in weights.items() if name}, file, {"format": "pt"})


def compose(folder, *words):
    return compose_config(["model=hub", f"model.name={folder}", *words])


def check(folder, *words, head=Head.tokens):
    config = compose(folder, *words)
    architecture = find_architecture(config.model, sequence_length=16, head=head)
    check_weights(config.model, architecture, TrainableParameters.of(config), head=head)


def build(folder, *words, head=Head.tokens):
    config = compose(folder, *words)
    architecture = find_architecture(config.model, sequence_length=16, head=head)
    trained = TrainableParameters.of(config)
    return build_model(config.model, architecture, seed=config.train.seed, trained=trained, head=head)


def refused(action, *args, **more):
    with pytest.raises(ConfigError) as caught:
        action(*args, **more)
    assert caught.value.where == "model.name"
    return str(caught.value)


DIFFERENT = {
    "prefixed": ("llama", lambda name: f"module.{name}", ("missing: 21 (lm_head.", "unexpected: 21 (module.lm_head.")),
    "less": ("gpt2", lambda name: name * ("1.ln_2.weight" not in name), ("missing: 1 (", "unexpected: 0")),
    "other": ("llama", lambda name: name.replace("1.mlp.up", "1.mlp.ut"), ("missing: 1 (", "unexpected: 1 (")),
    "experts": ("qwen3_moe", lambda name: name * ("1.mlp.experts" not in name), ("missing: 2 (", "experts.down_proj")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_names_that_are_not_the_models_are_refused_before_and_while_it_is_read(tmp_path, name):
    kind, change, said = DIFFERENT[name]
    make(tmp_path, kind)
    rename(tmp_path, change)
    for action in (check, build):
        message = refused(action, tmp_path)
        assert all(words in message for words in said), message
        assert "model.allow_missing=true" in message


def test_a_part_of_a_stack_is_missing(tmp_path):
    make(tmp_path, "qwen3_moe")
    rename(tmp_path, lambda name: name * ("1.mlp.experts.2.gate" not in name))
    assert "some are missing" in refused(check, tmp_path, "model.allow_missing=true")


def test_other_shapes_are_refused_with_both(tmp_path):
    make(tmp_path)
    message = refused(check, tmp_path, "model.config.intermediate_size=48")
    assert "model.layers.0.mlp.down_proj.weight: [32, 64], not [32, 48]" in message
    assert "model.config" in message


def test_what_transformers_takes_is_taken(tmp_path):
    """Tied heads, a model without its head, old names, and buffers of old versions."""
    make(tmp_path / "llama", tie_word_embeddings=True)
    make(tmp_path / "moe", "qwen3_moe")
    make(tmp_path / "body", "gpt2", auto=AutoModel)
    rename(tmp_path / "body", lambda name: name)
    weights = load_file(tmp_path / "body/model.safetensors") | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    save_file(weights, tmp_path / "body/model.safetensors", {"format": "pt"})
    for name in ("llama", "moe", "body"):
        check(tmp_path / name)
        build(tmp_path / name)


def test_a_layer_that_scores_is_new_and_the_head_goes(tmp_path):
    make(tmp_path, tie_word_embeddings=False)
    check(tmp_path, head=Head.score)
    first, second = (build(tmp_path, head=Head.score) for _ in range(2))
    assert torch.equal(first.score.weight, second.score.weight)
    rename(tmp_path, lambda name: name.replace("model.norm", "model.nom"))
    assert "missing: 1 (model.norm.weight)" in refused(check, tmp_path, head=Head.score)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fields", "lost"),
    [
        ("llama", BIAS, ("lm_head.weight", "layers.1.self_attn.k_proj.bias", "layers.0.mlp.up_proj.weight")),
        ("gpt2", {}, ("h.1.attn.c_proj.weight", "h.0.mlp.c_fc.bias")),
    ],
)
def test_what_is_missing_is_drawn_as_random_weights_are_and_the_rest_stays(tmp_path, dtype, kind, fields, lost, caplog):
    """In float32 also where the file is in bfloat16: so it is in all layouts."""
    saved = dict(make(tmp_path, kind, dtype, **fields).named_parameters())
    rename(tmp_path, lambda name: name * (not name.endswith(lost)))
    check(tmp_path, "model.allow_missing=true")
    model = build(tmp_path, "model.allow_missing=true")
    assert f"{len(lost)} missing" in caplog.text
    drawn = dict(build(tmp_path, "model.init=random").named_parameters())
    for name, value in model.named_parameters():
        expected = drawn[name] if name.endswith(lost) else saved[name].float()
        assert value.dtype == torch.float32
        assert torch.equal(value, expected), name


def test_an_adapter_beside_weights_that_nobody_else_has_is_refused(tmp_path):
    make(tmp_path, tie_word_embeddings=False)
    rename(tmp_path, lambda name: name * (name != "lm_head.weight"))
    assert "adapter=none" in refused(check, tmp_path, "model.allow_missing=true", "adapter=lora")
