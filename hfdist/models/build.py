"""A model with weights: random by name, or pretrained."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hfdist.config.model import Dtype, Init, ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.hub import reading_from_hub
from hfdist.models.initialize import initialize_by_name


def build_model(config: ModelConfig, architecture: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Make the model on the CPU, whole; under ZeRO-3 (TrainingArguments must exist by then) already cut.

    Args:
        config: where the weights come from and their type.
        architecture: from `find_architecture`.
        seed: of random weights.

    Raises:
        ConfigError: the pretrained weights cannot be read, or transformers refuses the architecture here.
    """
    dtype = _dtype(config.dtype)
    if config.init is Init.random:
        try:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(
                    architecture, dtype=dtype, trust_remote_code=config.trust_remote_code
                )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"transformers cannot make the model: {str(error).splitlines()[0]}",
                where="model.attention, model.config",
                found=config.attention.value,
                hint="model.attention=auto",
            ) from error
        initialize_by_name(model, seed)
        return model
    assert config.name is not None  # checked with the config
    with reading_from_hub("model.name", config.name):
        return AutoModelForCausalLM.from_pretrained(
            config.name,
            config=architecture,
            revision=config.revision,
            dtype=dtype,
            # A .bin file is a pickle, which can run code: only safetensors are read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )


def _dtype(dtype: Dtype) -> torch.dtype:
    # `auto` is float32 even for a bfloat16 checkpoint: small updates vanish in bfloat16 weights, so the
    # optimizer must have float32 ones; `train.precision` chooses the type of the arithmetic.
    return torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
