"""Floating-point operations of training, by one documented formula, and devices' peaks for MFU."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Dense half-precision peaks with float32 sums in FLOP/s, of one device as torch counts them, from the vendors' data
# sheets; by words that the device's name must have. The first entry that fits counts.
_PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100 HBM3": 989e12,
    "H100 SXM5": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 150e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX A6000": 155e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209e12,
    "RTX 4090 D": 147e12,
    "RTX 4090": 165e12,
    "RTX 3090 Ti": 80e12,
    "RTX 3090": 71e12,
    "V100S": 130e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
    # Two devices a module.
    "MI250X": 191.5e12,
    "MI250": 181e12,
    "MI210": 181e12,
    "MI300A": 980e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}
# Of a part of a device, or of one that runs slower than the name says.
_LESS = re.compile(r"MIG|GRID|LAPTOP|MAX|\d+[ABCQ]")


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
    return find_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def find_peak_flops(name: str) -> float | None:
    """The same by torch's name of the device, such as `NVIDIA H100 80GB HBM3`; None: not a known whole one."""
    words = set(re.findall(r"\w+", name.upper()))
    if any(_LESS.fullmatch(word) for word in words):
        return None
    return next((peak for known, peak in _PEAK_FLOPS.items() if words >= set(known.upper().split())), None)


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
