"""Starting from a model as a recipe does, without data."""

from __future__ import annotations

from pathlib import Path

from hfdist.config.model import Init, ModelConfig, TokenizerConfig
from hfdist.models import build_model, find_architecture
from hfdist.models.resolve import resolve_model
from hfdist.models.tokenizer import load_pretrained_tokenizer


def configure(name, revision=None, **more) -> ModelConfig:
    tokenizer = TokenizerConfig(name=str(name), revision=revision)
    return ModelConfig(name=str(name), revision=revision, init=Init.pretrained, tokenizer=tokenizer, **more)


def begin(name, cache: Path, revision=None, **more):
    """Give the model and the tokenizer."""
    start = resolve_model(configure(name, revision, **more), cache_dir=cache)
    architecture = find_architecture(start.model, sequence_length=16)
    tokenizer = load_pretrained_tokenizer(start.model, cache_dir=cache)
    start.fetch_weights()
    return build_model(start.model, architecture, seed=0), tokenizer


def assert_same_weights(model, other) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
