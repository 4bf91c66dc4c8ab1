"""Pack the experts of a tiny model in 4 bits beside PEFT's LoRA of all that it reaches, and compare one step."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.model import Quantization
from hfdist.models.adapter import NAME, inject_adapter
from hfdist.models.experts import num_experts
from hfdist.models.packed_experts import PackedStack, dequantize_expert, find_stacks, list_packed
from hfdist.models.packed_weights import PackedLinear, packed_shapes
from hfdist.models.quantize import quantize_frozen
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import TOLERANCE, compare_gradients, compare_losses, run_whole

MOST_BYTES = 0.6
"""Of a weight of experts that is called packed."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What came of one type."""

    bytes_per_weight: float = 0.0
    """Of all stacks of experts, with their scales."""
    left: tuple[str, ...] = ()
    """Kinds of names of experts that stay as they are."""
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    worst_parameter: str = ""

    @property
    def verdict(self) -> str:
        """`no experts`, `left`, `exact`, or `wrong`."""
        is_exact = self.loss_difference <= TOLERANCE and self.gradient_difference <= TOLERANCE
        if not is_exact or self.bytes_per_weight > MOST_BYTES:
            return "wrong"
        return "exact" if self.bytes_per_weight else "left" if self.left else "no experts"


def pack_type(model_type: str) -> Packed:
    """Run two micro batches through the packed model, and through PEFT's over dequantized weights."""
    model = tiny_model(model_type)
    model.requires_grad_(False)
    if not any(map(find_stacks, model.modules())) and not any(_left(model)):
        return Packed()
    add_lora(model)
    whole = copy.deepcopy(model)
    quantize_frozen(model, Quantization.nf4)
    left = {re.sub(r"\.\d+", "", name) for name, parameter in _left(model)}
    packed = put_dequantized(model, whole)
    held = sum(model.get_parameter(name).nbytes for name in packed)
    count = sum(whole.get_parameter(name).numel() for name in packed)
    batches = [tiny_batch(model, seed=seed) for seed in (1, 2)]
    ours, wanted = run_whole(model, batches), run_whole(whole, batches)
    gradient_difference, worst_parameter = compare_gradients(ours.gradients, wanted.gradients)
    return Packed(
        bytes_per_weight=held / max(1, count),
        left=tuple(sorted(left)),
        loss_difference=compare_losses(ours.losses, wanted.losses),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
    )


@torch.no_grad()
def add_lora(model: PreTrainedModel) -> None:
    """Put LoRA into all linear layers and stacks of experts, with values that matter."""
    stacks = [f"{path}.{name}" for path, module in model.named_modules() for name in find_stacks(module)]
    # Not all: Mamba's kernels, and some routers, do not take a layer with LoRA.
    layers = r".*\.(q_proj|v_proj|q_b_proj|q_a_proj|kv_proj|query_key_value|Wqkv)"
    inject_adapter(model, LoraConfig(r=4, target_modules=layers, target_parameters=stacks), NAME)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.normal_(std=0.05, generator=random)


def dequantize_stack(stack: PackedStack, packed: torch.Tensor) -> torch.Tensor:
    """Give the whole stack, of its shape and type."""
    how = stack.shape[1:], stack.dtype, stack.quantization.value
    return torch.stack([dequantize_expert(*expert, *how) for expert in zip(*stack.open(packed), strict=True)])


@torch.no_grad()
def put_dequantized(model: PreTrainedModel, whole: PreTrainedModel) -> set[str]:
    """Put what the packed weights of `model` stand for into `whole`; give the names of stacks of experts."""
    stacks = set()
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            whole.get_submodule(path).weight.copy_(dequantize_4bit(module.weight.data, module.quant_state))
        for name, stack in list_packed(module).items():
            whole.get_parameter(f"{path}.{name}").copy_(dequantize_stack(stack, getattr(module, name)))
            stacks.add(f"{path}.{name}")
    return stacks


def _left(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """List frozen weights of experts that are as they were."""
    packed, number = packed_shapes(model), num_experts(model.config.get_text_config(decoder=True))
    for name, parameter in model.named_parameters():
        is_stack = parameter.ndim == 3 and (parameter.shape[0] == number > 1 or "expert" in name)
        is_named = parameter.ndim >= 2 and ".experts." in name and not name.endswith("bias")
        if not parameter.requires_grad and parameter not in packed and (is_stack or is_named):
            yield name, parameter
