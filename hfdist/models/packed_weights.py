"""Frozen weights in 4 bits: the linear layer that computes with one, and the shapes, scales and floats of all.

The weight of a linear layer comes with a state that has its shape and its scales; a stack of experts holds its own
scales (packed_experts.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hfdist.config.model import Quantization
from hfdist.models.packed_experts import list_packed


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight is in 4 bits; it computes in the type of its inputs, or in autocast's.

    Not the layer of bitsandbytes, which changes its weight in evaluations on some CPUs, and puts another parameter in
    the place of one that FSDP2 has gathered. The arithmetic is its.
    """

    def __init__(self, layer: nn.Linear, quantization: Quantization) -> None:
        super().__init__()
        # Optional, and slow to import. It says nothing of its types.
        library = importlib.import_module("bitsandbytes")
        self._multiply = library.matmul_4bit
        # The scales of blocks are quantized, too, as in the paper.
        packed, self.quant_state = library.functional.quantize_4bit(
            layer.weight.data.contiguous(), compress_statistics=True, quant_type=quantization.value
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] by the weight, as `nn.Linear` does."""
        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        product: torch.Tensor = self._multiply(inputs, self.weight, quant_state=self.quant_state)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _apply(self, function: object, recurse: bool = True) -> PackedLinear:
        # Scales move with the weight, and keep their types.
        super()._apply(function, recurse)
        self.quant_state.to(self.weight.device)
        return self


def hold_as_floats(module: nn.Module, device: str) -> list[torch.Tensor]:
    """Turn packed weights into float32 parameters of the same bits, in place: torch 2.11's FSDP2 takes none but floats.

    Args:
        module: layers whose weights FSDP2 has sharded already stay as they are.
        device: the type of the one that the scales go to.

    Returns:
        The scales of linear layers, there: every rank holds all of them. Those of experts are with their weights.
    """
    scales = []
    for layer, packed, state in _packed_layers(module):
        if not isinstance(packed, DTensor):
            layer.weight = _as_floats(packed)
            layer.quant_state = state
            state.to(device)
            scales += scales_of(state)
    for experts, name in _packed_stacks(module):
        packed = experts.get_parameter(name)
        if not isinstance(packed, DTensor):
            setattr(experts, name, _as_floats(packed))
    return scales


def _as_floats(packed: torch.Tensor) -> nn.Parameter:
    # The filling is never read.
    whole = functional.pad(packed.data.view(torch.uint8).flatten(), (0, -packed.nbytes % torch.float32.itemsize))
    return nn.Parameter(whole.view(torch.float32)[:, None], requires_grad=False)


def packed_shapes(model: nn.Module) -> dict[torch.Tensor, tuple[int, ...]]:
    """Give the shapes of what quantized parameters stand for, also of sharded ones: matrices, stacks of them."""
    layers = {packed: tuple(state.shape) for _, packed, state in _packed_layers(model)}
    stacks = {experts.get_parameter(name): list_packed(experts)[name].shape for experts, name in _packed_stacks(model)}
    return layers | stacks


def _packed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor, Any]]:
    """List each layer with a packed weight, the weight, and the state of bitsandbytes that says what it means."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        # bitsandbytes keeps it with the weight, and `PackedLinear` in the layer.
        state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
        if weight is not None and state is not None:
            yield layer, weight, state


def _packed_stacks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """List modules of experts with the names of their packed stacks."""
    return ((experts, name) for experts in model.modules() for name in list_packed(experts))


def scales_of(state: Any) -> list[torch.Tensor]:
    """Give what blocks of weights are multiplied with, and the numbers that codes stand for."""
    states = (state, state.state2) if state.nested else (state,)
    return [value for one in states for value in vars(one).values() if isinstance(value, torch.Tensor)]
