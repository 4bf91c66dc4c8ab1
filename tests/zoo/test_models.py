"""Every type of the zoo builds, is small, has every kind of block of the full model, and trains."""

import pytest
import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfdist.models.flops import num_parameters
from tests.zoo.models import (
    NOT_BUILDABLE,
    SAMPLE,
    SHARDED_SAMPLE,
    TYPES,
    full_config,
    make_model,
    tiny_batch,
    tiny_model,
)

pytestmark = pytest.mark.zoo

NUM_BLOCKS = 6


def shapeless(model_type, config):
    """The model without memory or values."""
    with torch.device("meta"), no_init_weights():
        return make_model(model_type, config)


def kinds_of_blocks(model):
    """For each list of modules: the classes of its entries, each with the names of its parameters."""

    def numberless(name):
        return ".".join("#" if part.isdigit() else part for part in name.split("."))

    return {
        (numberless(name), type(block).__name__, frozenset(numberless(p) for p, _ in block.named_parameters()))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for block in module
    }


def test_every_type_of_transformers_is_known():
    assert len(SAMPLE) == len(set(SAMPLE))
    assert set().union(*SHARDED_SAMPLE.values()) <= set(SAMPLE)
    assert set(SAMPLE) <= set(TYPES)
    assert set(TYPES) | set(NOT_BUILDABLE) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_tied(model):
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return hasattr(head, "weight") and head.weight is getattr(embedding, "weight", None)


def test_it_is_the_full_model_made_small_and_trains(model_type):
    model = tiny_model(model_type, NUM_BLOCKS)
    assert num_parameters(model) <= 2_000_000
    assert any(isinstance(module, nn.ModuleList) and len(module) == NUM_BLOCKS for module in model.modules())
    if model_type != "gemma3n":  # its tower needs timm; gemma3n_text has the same blocks
        full = shapeless(model_type, full_config(model_type))
        assert kinds_of_blocks(model) == kinds_of_blocks(full)
        full.tie_weights()
        assert is_tied(model) == is_tied(full)
    loss = model(**tiny_batch(model)).loss
    assert torch.isfinite(loss)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    # The gradient has come down through all blocks.
    assert any(p.grad is not None and p.grad.any() for p in model.get_input_embeddings().parameters())
    same, other = (list(tiny_model(model_type, NUM_BLOCKS, seed=seed).parameters()) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other, strict=True))
