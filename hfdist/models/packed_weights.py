"""Frozen weights in 4 bits: the linear layer that computes with one, and what FSDP2 and plans must know of them.

The weight of a linear layer comes with a state that has its shape and its scales. A stack of experts is packed in
another way: its scales are in the same parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hfdist.config.model import Quantization
from hfdist.models.packed_experts import list_packed


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight is in 4 bits; it computes in the type of its inputs, or in autocast's.

    It takes the place of the layer of bitsandbytes, and has its arithmetic. That layer changes its weight in
    evaluations on some CPUs, and puts another parameter in the place of one that FSDP2 has gathered.
    """

    def __init__(self, layer: nn.Linear, quantization: Quantization) -> None:
        super().__init__()
        # bitsandbytes is optional, slow to import, and without types.
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
    """Turn packed weights into float32 parameters of the same bits, in place: torch 2.11's FSDP2 takes only floats.

    Args:
        module: a module with packed weights; weights that FSDP2 has sharded already stay as they are.
        device: the type of device to which the scales go.

    Returns:
        The scales of linear layers on that device, all of which every rank holds. Scales of experts are a part of their
        weights.
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
    """Give the bytes of a packed weight as a float32 parameter of shape [floats, 1]."""
    # The bytes that fill up the last float are never read.
    filling = -packed.nbytes % torch.float32.itemsize
    whole = functional.pad(packed.data.view(torch.uint8).flatten(), (0, filling))
    return nn.Parameter(whole.view(torch.float32)[:, None], requires_grad=False)


def packed_shapes(model: nn.Module) -> dict[torch.Tensor, tuple[int, ...]]:
    """Give the whole shape of the matrix or stack that each packed parameter stands for, also where it is sharded."""
    shapes = {layer.packed: tuple(layer.state.shape) for layer in _packed_layers(model)}
    for experts, name in _packed_stacks(model):
        shapes[experts.get_parameter(name)] = list_packed(experts)[name].shape
    return shapes


class _PackedLayer(NamedTuple):
    """A linear layer with a packed weight."""

    layer: nn.Module
    packed: torch.Tensor
    state: Any
    """The `QuantState` of bitsandbytes, which has no types: shape, scales and code of the weight."""


def _packed_layers(model: nn.Module) -> Iterator[_PackedLayer]:
    """List the linear layers with packed weights."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        # bitsandbytes keeps the state in the weight, and `PackedLinear` in the layer.
        state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
        if weight is not None and state is not None:
            yield _PackedLayer(layer, weight, state)


def _packed_stacks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """List the packed stacks in a model: each as its module of experts and the name of its parameter there."""
    return ((experts, name) for experts in model.modules() for name in list_packed(experts))


def scales_of(state: Any) -> list[torch.Tensor]:
    """List the tensors of a `QuantState` of bitsandbytes: scales of blocks, and the numbers that codes stand for."""
    # Scales may be quantized themselves, with a state of their own.
    levels = (state, state.state2) if state.nested else (state,)
    return [value for level in levels for value in vars(level).values() if isinstance(value, torch.Tensor)]
