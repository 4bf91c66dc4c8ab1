"""Floating-point operations of training, by one documented formula, and devices' peaks for MFU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Dense bf16 peaks in FLOP/s from the vendors' data sheets, by a part of torch's device name.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a whole model, also where a rank holds a part of it."""

    num_parameters: int
    """Tied ones once."""
    num_multiplying: int
    """All but an input embedding that is only looked up."""
    num_trained: int
    """Those that are not frozen."""


def measure_size(model: PreTrainedModel) -> ModelSize:
    """Count a model that is whole, or cut by ZeRO-3."""
    total = num_parameters(model)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = 0 if embedding is None or head is embedding else whole_numel(embedding)
    return ModelSize(num_parameters=total, num_multiplying=total - looked_up, num_trained=num_trained(model))


def flops_per_token(config: PreTrainedConfig, size: ModelSize, sequence_length: int) -> float:
    """Forward and backward operations of one token:

        4 * N + 2 * M + 12 * L * H * T

    N: parameters that multiply (all but the input embedding; a tied head counts once), M: those of them that are
    trained, L: blocks, H: attention heads times head size, T: tokens in a sequence. The attention term counts the full
    square, not the causal half, as PaLM's and llm-foundry's MFU do. Recomputed activations are not counted.
    """
    text = config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", 0) or 0
    # Of some types blocks differ, and the config of the whole refuses to give one number for them.
    blocks = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * num_layers
    attended = sum(_attention_width(block) for block in blocks)
    trained = min(size.num_trained, size.num_multiplying)
    return 4.0 * size.num_multiplying + 2.0 * trained + 12.0 * attended * sequence_length


def _attention_width(block: PreTrainedConfig) -> int:
    num_heads = getattr(block, "num_attention_heads", 0) or 0
    hidden_size = getattr(block, "hidden_size", 0) or 0
    return int(num_heads * (getattr(block, "head_dim", None) or (hidden_size // num_heads if num_heads else 0)))


def peak_flops(device: torch.device) -> float | None:
    """Peak operations a second of one device in bf16, or None where it is not known (a CPU, for one)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def num_parameters(model: torch.nn.Module) -> int:
    """Number of parameters of the whole model, also where ZeRO-3 has cut them; tied ones once."""
    return sum(whole_numel(parameter) for parameter in model.parameters())


def num_bytes(model: torch.nn.Module) -> int:
    """The same in bytes, each in the type that it is held in."""
    return sum(whole_numel(parameter) * parameter.element_size() for parameter in model.parameters())


def num_trained(model: torch.nn.Module) -> int:
    """The same of those that are not frozen."""
    return sum(whole_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)


def whole_numel(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter: DeepSpeed leaves a cut one empty and keeps its size beside it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
