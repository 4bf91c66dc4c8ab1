"""Random weights depend on the seed and the parameter's name alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from hfdist.models.initialize import initialize_by_name

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY = {
    "llama": SIZES | ATTENTION,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64},
    "qwen3_moe": SIZES | ATTENTION | {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 16},
    "mamba": SIZES | {"state_size": 4},
}


def tiny(kind: str, seed: int, dtype=torch.float32, **fields):
    config = AutoConfig.for_model(kind, **{**TINY[kind], **fields})
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    initialize_by_name(model, seed)
    return model


@pytest.mark.parametrize("kind", TINY)
def test_equal_seeds_give_equal_weights_whatever_was_drawn_before(kind):
    torch.manual_seed(1)
    first = tiny(kind, seed=5)
    torch.manual_seed(2)
    second = tiny(kind, seed=5)
    other = tiny(kind, seed=6)
    for (name, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.isfinite(left).all(), name
        assert torch.equal(left, right), name
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("qwen3_moe", torch.bfloat16)]
)
def test_half_precision_starts_from_the_same_weights_rounded(kind, dtype):
    """As ZeRO-3 makes them; some versions of torch draw other numbers in half precision."""
    whole, half = tiny(kind, seed=5), tiny(kind, seed=5, dtype=dtype)
    for (name, left), right in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert right.dtype == dtype
        assert torch.equal(left.to(dtype), right), name


@pytest.mark.parametrize("kind", sorted(TINY.keys() - {"gpt2"}))  # it scales its residual projections by the depth
def test_a_deeper_model_starts_with_the_same_blocks(kind):
    """What a process holds changes nothing: the shallow model's parameters are a subset of the deep one's."""
    shallow, deep = (dict(tiny(kind, 3, num_hidden_layers=depth).named_parameters()) for depth in (2, 3))
    assert shallow.keys() < deep.keys()
    for name, value in shallow.items():
        assert torch.equal(value, deep[name]), name


@pytest.mark.parametrize("kind", TINY)
def test_the_distribution_is_the_one_of_transformers(kind):
    """Compare means and deviations with transformers' own initialization of the same config."""
    ours = dict(tiny(kind, seed=0, vocab_size=512).named_parameters())
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY[kind], "vocab_size": 512}))
    for name, reference in theirs.named_parameters():
        own, scale = ours[name], reference.std().item() if reference.numel() > 1 else 0.0
        # Five standard errors of a sample of this size, twice because both sides are samples.
        error = 10 / own.numel() ** 0.5
        assert own.std().item() == pytest.approx(scale, rel=error, abs=1e-6), name
        assert own.mean().item() == pytest.approx(reference.mean().item(), abs=error * scale + 1e-6), name


def test_tied_weights_are_drawn_once():
    tied, untied = tiny("llama", 0, tie_word_embeddings=True), tiny("llama", 0, tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.model.embed_tokens.weight, untied.model.embed_tokens.weight)
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_a_tied_head_with_a_bias_leaves_the_embedding_as_it_was_drawn():
    """Under ZeRO-3 it could not draw it again, since only the bias is gathered there."""
    config = AutoConfig.for_model("bert", is_decoder=True, **SIZES, intermediate_size=64, num_attention_heads=2)
    drawn = {}
    for ties in (True, False):
        config.tie_word_embeddings = ties
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        initialize_by_name(model, 5)
        head = model.get_output_embeddings()
        assert (head.weight is model.get_input_embeddings().weight) is ties
        assert head.bias is not None
        drawn[ties] = model.get_input_embeddings().weight
    assert torch.equal(drawn[True], drawn[False])
