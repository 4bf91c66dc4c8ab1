"""Counts the floating-point operations of training by one documented formula, and gives devices' peaks for MFU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.hardware import match_device
from hfdist.models.embeddings import input_embeddings
from hfdist.models.experts import first_number, num_active

Numel = Callable[[torch.Tensor], int]
"""Takes a parameter, of which a rank may hold a part, and gives the number of elements of the whole one."""
HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
"""What configs call the width of hidden states."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Numbers of parameters of a whole model, also where a rank holds a part of it."""

    num_parameters: int
    """Number of all parameters; tied ones count once."""
    num_multiplying: float
    """Number of parameters that multiply a token, without an embedding that is only looked up, and without a pooler,
    which reads one token of a row. Of experts, the share that a router chooses counts, so it may be no whole number."""
    num_trained: int
    """Number of parameters that are not frozen."""
    num_of_source: float = 0.0
    """Of an encoder-decoder, parameters that multiply tokens of sources: the encoder's, and those that make keys and
    values of what it gives."""


_KEYS_OF_SOURCE = re.compile(r"\.\w*(?:enc|cross)\w*\.(?:\w+\.)*(?:[kv]|[kv]_proj|key|value)\.", re.IGNORECASE)
"""In the name of a parameter of a decoder: it makes keys or values of what the encoder gives."""
_OF_POOLER = re.compile(r"(^|\.)pooler\.")
"""In the name of a parameter: BERT and its kin read their first token with it."""


def measure_size(model: PreTrainedModel, numel: Numel = torch.numel) -> ModelSize:
    """Count the parameters of a model.

    Args:
        model: a model with all its modules; a rank may hold a part of each parameter.
        numel: gives the number of elements of the whole parameter, also where a rank holds a part.
    """
    total = num_parameters(model, numel)
    idle, head = _find_idle(model), getattr(model.get_output_embeddings(), "weight", None)
    active = num_active(model.named_parameters(), model.config.get_text_config(), numel)
    return ModelSize(
        num_parameters=total,
        num_multiplying=active - sum(numel(own) for own in idle.values() if own is not head),
        num_trained=num_trained(model, numel),
        num_of_source=_count_of_source(model, idle, numel),
    )


def _find_idle(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Find the parameters that multiply no token where they stand, by their ids: tables, and poolers.

    A tied head is among them.
    """
    embedding = getattr(input_embeddings(model), "weight", None)
    tables = (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding))
    poolers = (parameter for name, parameter in model.named_parameters() if _OF_POOLER.search(name))
    return {id(own): own for own in (embedding, *tables, *poolers) if own is not None}


def _count_of_source(model: PreTrainedModel, idle: Mapping[int, torch.Tensor], numel: Numel) -> float:
    if not model.config.is_encoder_decoder:
        return 0.0
    encoder: object = model.get_encoder()
    of_encoder = {id(p) for p in encoder.parameters()} if isinstance(encoder, torch.nn.Module) else set()
    return float(
        sum(
            numel(parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in idle and (id(parameter) in of_encoder or _KEYS_OF_SOURCE.search(f".{name}"))
        )
    )


def flops_per_token(config: PreTrainedConfig, size: ModelSize, sequence_length: int, target_length: int = 0) -> float:
    """Give the floating-point operations of the forward and backward of one token:

        4 * N + 2 * M + 12 * L * H * T

    N: parameters that multiply a token (no embedding that is looked up, no pooler, and of experts only those that a
    router chooses; a tied head counts once), M: those of them that are trained, L: blocks, H: attention heads times
    head size, T: tokens in a sequence. The attention term counts the full square, not the causal half, as PaLM's and
    llm-foundry's MFU do. Recomputed activations are not counted. Packed documents count as one; `mfu_documents` of a
    run counts the square of each.

    With `target_length` T of an encoder-decoder and `sequence_length` S of its sources, the mean over the tokens of
    both: each multiplies the weights of its side, and L * T is that of S * S, of T * T, and of T * S across.
    """
    text = config.get_text_config()
    if target_length:
        return _flops_of_pair(text, size, sequence_length, target_length) / (sequence_length + target_length)
    num_layers = getattr(text, "num_hidden_layers", 0) or 0
    # Where the blocks of a type differ, the config of the whole model refuses to give one number for them.
    blocks = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * num_layers
    attended = sum(attention_width(block) for block in blocks)
    trained = min(size.num_trained, size.num_multiplying)
    return 4.0 * size.num_multiplying + 2.0 * trained + 12.0 * attended * sequence_length


def _flops_of_pair(config: PreTrainedConfig, size: ModelSize, source: int, target: int) -> float:
    """Give the operations of a row of source and target."""
    of_weight = 4.0 + 2.0 * min(1.0, size.num_trained / size.num_multiplying)
    of_target = size.num_multiplying - size.num_of_source
    encoders = first_number(config, ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers"))
    decoders = first_number(config, ("decoder_layers", "num_decoder_layers", "num_hidden_layers"))
    attended = encoders * source**2 + decoders * (target**2 + target * source)
    weights = size.num_of_source * source + of_target * target
    return of_weight * weights + 12.0 * attention_width(config) * attended


def attention_width(block: PreTrainedConfig) -> int:
    """Give the number of attention heads times their size, by the config of a block or a text model; 0: no heads."""
    # `num_heads` does not count: some models without attention have it for their states.
    num_heads = first_number(block, ("num_attention_heads", "n_head"))
    if num_heads == 0:
        return 0
    head_size = first_number(block, ("head_dim",)) or first_number(block, HIDDEN_SIZES) // num_heads
    return num_heads * head_size


def peak_flops(device: torch.device) -> float | None:
    """Give a device's peak of operations a second in bf16; None: it is not known, as for a CPU."""
    return find_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def find_peak_flops(name: str) -> float | None:
    """Give the peak of operations a second in bf16, by torch's name of a device, such as `NVIDIA H100 80GB HBM3`.

    Returns:
        None: the device is not known, or is a part of a GPU.
    """
    hardware = match_device(name)
    return None if hardware is None else hardware.half_flops


def num_parameters(model: torch.nn.Module, numel: Numel = torch.numel) -> int:
    """Give the number of elements of all parameters; tied ones count once."""
    return sum(map(numel, model.parameters()))


def num_bytes(model: torch.nn.Module, numel: Numel = torch.numel) -> int:
    """Give the size of the parameters in bytes, each in the type that it is held in."""
    return sum(numel(parameter) * parameter.element_size() for parameter in model.parameters())


def num_trained(model: torch.nn.Module, numel: Numel = torch.numel) -> int:
    """Give the number of elements of the parameters that are not frozen; tied ones count once."""
    return sum(numel(parameter) for parameter in model.parameters() if parameter.requires_grad)
