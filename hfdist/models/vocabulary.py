"""Fits the vocabulary in a model's config to the tokenizer: its size, and the ids of special tokens."""

from __future__ import annotations

import shlex

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.model import Init, ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.target_loss import fill_special_ids


def fit_vocabulary(architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Check that the model has an embedding for each token; fit the config of a model with random weights, in place.

    Such a model takes the tokenizer's size, unless `model.config.vocab_size` gives one, and its special ids.

    Args:
        architecture: the model's config, which is changed for random weights.
        tokenizer: the run's tokenizer.
        config: the run's config of the model.

    Raises:
        ConfigError: the tokenizer has more tokens than the model has embeddings, or lacks one that the type must have.
    """
    text = architecture.get_text_config()
    size = len(tokenizer)
    is_random = config.init is Init.random
    is_trained_for_it = config.tokenizer.name is None
    if is_random and "vocab_size" not in config.config and (is_trained_for_it or text.vocab_size < size):
        text.vocab_size = size
    if text.vocab_size < size:
        what = "the tokenizer has more tokens than the model has embeddings"
        where, hint = "model.config.vocab_size", f"model.config.vocab_size={size}"
        if not is_random and "vocab_size" in config.config:
            hint = "without model.config.vocab_size: it is that of the model's files"
        elif not is_random:
            # The embeddings are in the model's files: with another number of them it would be another model.
            where, hint = "model.tokenizer.name", _give_embeddings(architecture, config, size)
        found = f"{text.vocab_size} embeddings, {size} tokens"
        raise ConfigError(what, where=where, found=found, allowed=f">= {size} embeddings", hint=hint)
    if is_random:
        # In a model of image and text, the config of the part for text has special ids of its own.
        _take_special_ids(architecture, tokenizer)
        _take_special_ids(text, tokenizer)
        if architecture.is_encoder_decoder:
            fill_special_ids(architecture, tokenizer.eos_token_id)


def _take_special_ids(architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the ids of special tokens in a config to those of the tokenizer."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        try:
            setattr(architecture, name, getattr(tokenizer, name))
        except StrictDataclassError as error:
            what = f"models of this type have a {name}, and the tokenizer has none"
            hint = "model.tokenizer.name=ID of a tokenizer that has one, or another model.type"
            raise ConfigError(what, where="model.type", found=architecture.model_type, hint=hint) from error


def _give_embeddings(architecture: PreTrainedConfig, config: ModelConfig, size: int) -> str:
    """Give a command that makes a folder with more embeddings from this model, and the override for the next start."""
    # The class that the model's files name: a class without their head would leave the head out.
    named = architecture.architectures or ()
    model_class = next((name for name in named if hasattr(transformers, name)), "AutoModelForCausalLM")
    code = (
        f"from transformers import {model_class} as Model, AutoTokenizer as Tokenizer; "
        f"model = Model.from_pretrained({config.name!r}, dtype='auto'); model.resize_token_embeddings({size}); "
        "model.save_pretrained('resized'); "
        f"Tokenizer.from_pretrained({config.tokenizer.name!r}).save_pretrained('resized')"
    )
    return f"python -c {shlex.quote(code)}, then model.name=resized; or a tokenizer of no more tokens"
