"""`adapter.quantization`: the frozen linear layers beside an adapter in 4 bits (QLoRA, Dettmers et al. 2023).

Layers are quantized one by one, once a rank has no more than its own blocks. Each rank does it by itself: it is a
function of the weights. Their names stay, and the adapter is saved without them, so checkpoints and merged models are
those of LoRA.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.model import Quantization
from hfdist.errors import ConfigError

logger = logging.getLogger(__name__)


def quantize_frozen(model: PreTrainedModel, quantization: Quantization) -> None:
    """Put layers of bitsandbytes in the place of frozen linear layers, but for the head; in place.

    Raises:
        ConfigError: the model has none.
    """
    # Optional, and slow to import. It says nothing of its types.
    nn_4bit: Any = importlib.import_module("bitsandbytes.nn")
    head = model.get_output_embeddings()
    before = after = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            # A class of its own has a forward of its own; and what is on another stage has no weight.
            if type(layer) is not nn.Linear or layer is head or layer.weight is None or layer.weight.requires_grad:
                continue
            weight, kind = layer.weight.data, quantization.value
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            quantized = nn_4bit.Linear4bit(*sizes, quant_type=kind, device="meta")
            # The scales of blocks are quantized, too, as in the paper.
            packed = nn_4bit.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=True)
            quantized.weight = packed.to(weight.device)
            quantized.bias = layer.bias
            # Else an evaluation on such a CPU repacks the weights for good, and later steps get no gradients.
            quantized.support_avx512bf16_for_cpu = False
            setattr(module, name, quantized.train(layer.training))
            before += weight.numel() * weight.element_size()
            after += sum(one.numel() * one.element_size() for one in _stored(quantized))
    if not before:
        what = "the model has no frozen linear layer of torch.nn.Linear that could be quantized"
        found = f"{quantization.value}, with {type(model).__name__}"
        raise ConfigError(what, where="adapter.quantization", found=found, hint="adapter=lora")
    logger.info("adapter.quantization: frozen layers take %.1f MB in place of %.1f", after / 1e6, before / 1e6)


def _stored(layer: Any) -> list[torch.Tensor]:
    state = layer.weight.quant_state
    return [layer.weight, state.absmax, state.code, state.state2.absmax, state.state2.code]


def packed_shape(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Give the shape of the matrix that a quantized parameter stands for; None: it is not quantized."""
    state = getattr(parameter, "quant_state", None)
    return None if state is None else tuple(state.shape)
