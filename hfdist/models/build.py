"""A model with weights: random by name, or pretrained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.model import Dtype, Init, ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.hub.client import reading_from_hub
from hfdist.models.initialize import initialize_by_name
from hfdist.models.trainable.parameters import TrainableParameters

Cut = Callable[[PreTrainedModel], None]
"""Leaves this rank's part in a whole model, in place."""


def build_model(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    *,
    seed: int,
    cut: Cut = lambda model: None,
    trained: TrainableParameters | None = None,
) -> PreTrainedModel:
    """Make the model on the CPU, as much of it as `cut` leaves; TrainingArguments must exist by then.

    No more memory is touched than for what is left: random weights are drawn, and those of a file read and converted,
    after the cut.

    Args:
        config: where the weights come from and their type.
        architecture: from `find_architecture`.
        seed: of random weights.
        cut: leaves this rank's part in the model, in place (ZeRO-3 cuts by itself, while the model is made).
        trained: what of it is trained; None: all.

    Raises:
        ConfigError: the pretrained weights cannot be read, or transformers refuses the architecture here.
    """
    trained = trained or TrainableParameters()
    _check_not_quantized(architecture)
    if config.init is Init.random:
        return _draw(config, architecture, trained, seed, cut)
    return _read(config, architecture, trained, seed, cut)


def _draw(
    config: ModelConfig, architecture: PreTrainedConfig, trained: TrainableParameters, seed: int, cut: Cut
) -> PreTrainedModel:
    """Random weights."""
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                architecture, dtype=_dtype(config.dtype), trust_remote_code=config.trust_remote_code
            )
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot make the model: {str(error).splitlines()[0]}",
            where="model.attention, model.config",
            found=config.attention.value,
            hint="model.attention=auto",
        ) from error
    # `no_init_weights` leaves ties undone too; a tied parameter must be one before it is drawn.
    model.tie_weights()
    if trained.adapter.is_used:
        # By the names that the weights have without it, and not over it.
        initialize_by_name(model, seed)
    trained.choose(model, seed=seed)
    cut(model)
    if not trained.adapter.is_used:
        initialize_by_name(model, seed)
    return model


def _read(
    config: ModelConfig, architecture: PreTrainedConfig, trained: TrainableParameters, seed: int, cut: Cut
) -> PreTrainedModel:
    """Weights of a file."""
    assert config.name is not None  # checked with the config
    dtype, is_cut_already = _dtype(config.dtype), is_deepspeed_zero3_enabled()
    with reading_from_hub("model.name", config.name):
        model = AutoModelForCausalLM.from_pretrained(
            config.name,
            config=architecture,
            revision=config.revision,
            # As in the file, so that its pages are mapped and only those of what is left are ever read. ZeRO-3 reads
            # and cuts at once, and cannot change the type afterwards.
            dtype=dtype if is_cut_already else "auto",
            # A .bin file is a pickle, which can run code: only safetensors are read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    if trained.reads_weights and not is_cut_already:
        nn.Module.to(model, dtype)
    trained.choose(model, seed=seed)
    cut(model)
    if not is_cut_already:
        with trained.kept_in_float32(model):
            nn.Module.to(model, dtype)
    return model


def _check_not_quantized(architecture: PreTrainedConfig) -> None:
    quantization = getattr(architecture, "quantization_config", None)
    if quantization is not None:
        raise ConfigError(
            "the weights are quantized, and cannot be trained or adapted here",
            where="model.name",
            found=f"a quantization_config in its config.json: {str(quantization)[:200]}",
            hint="the repository that it was quantized from; adapter=lora model.dtype=bfloat16 is the least memory",
        )


def _dtype(dtype: Dtype) -> torch.dtype:
    # `auto` is float32 even for a bfloat16 checkpoint: small updates vanish in bfloat16 weights, so the
    # optimizer must have float32 ones; `train.precision` chooses the type of the arithmetic.
    return torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
