"""`adapter.quantization`: the frozen weights beside an adapter in 4 bits (QLoRA, Dettmers et al. 2023).

Linear layers and stacks of experts are quantized one by one, once a rank has no more than its own blocks. Each rank
does it by itself: it is a function of the weights. Their names stay, and the adapter is saved without them, so
checkpoints and merged models are those of LoRA.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.config.model import Quantization
from hfdist.errors import ConfigError
from hfdist.models.packed_experts import find_stacks, list_packed, make_levels, pack_experts
from hfdist.models.partitioning import WHOLE, Partitioning, whole_shape
from hfdist.models.stacked_experts import run_by_products

logger = logging.getLogger(__name__)

_WRAPPED = "base_layer"
"""What PEFT calls a layer beside which it puts LoRA."""


def check_installed(quantization: Quantization) -> None:
    """Raise a ConfigError where there is no bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        what, hint = "weights of 4 bits need a package that is not installed", "pip install 'hfdist[qlora]'"
        raise ConfigError(what, where="adapter.quantization", found=quantization.value, hint=hint)


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


def quantize_frozen(model: PreTrainedModel, quantization: Quantization, layout: Partitioning = WHOLE) -> None:
    """Put weights of 4 bits in the place of frozen linear layers, but for the head, and of stacks of experts; in place.

    ZeRO-3 partitions these weights when DeepSpeed gets the model; until then they are whole on each rank.

    Args:
        model: a model that `layout` has partitioned.
        quantization: the type.
        layout: how the model is partitioned.

    A collective.

    Raises:
        ConfigError: no rank has any; on all ranks alike.
    """
    sizes = [*_quantize_layers(model, quantization, layout), *_quantize_experts(model, quantization, layout)]
    # A stage of a pipeline may have none, and then the others do not wait for it.
    if not any(gather_json(bool(sizes))):
        what = "the model has no frozen linear layer of torch.nn.Linear, and no stack of experts, to quantize"
        found = f"{quantization.value}, with {type(model).__name__}"
        raise ConfigError(what, where="adapter.quantization", found=found, hint="adapter=lora")
    _copy_from_files(model)
    before, after = (sum(size[place] for size in sizes) for place in range(2))
    logger.info("adapter.quantization: frozen weights take %.1f MB in place of %.1f", after / 1e6, before / 1e6)
    _tell_what_is_left(model)


def _copy_from_files(model: PreTrainedModel) -> None:
    """Copy what was not quantized: all of a file of weights stays in memory as long as one tensor is a view of it."""
    packed = packed_shapes(model)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter not in packed and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _quantize_layers(
    model: PreTrainedModel, quantization: Quantization, layout: Partitioning
) -> Iterator[tuple[int, int]]:
    """Give bytes of each layer, before and after."""
    head, read = model.get_output_embeddings(), _find_read(model)
    tables: dict[int, torch.Tensor] = {}
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            # A class of its own has a forward of its own; and what is on another stage has no weight.
            if type(layer) is not nn.Linear or layer is head or layer.weight is None or layer.weight.requires_grad:
                continue
            if (path.rpartition(".")[2] if name == _WRAPPED else name) in read:
                continue
            with layout.gathered(layer.parameters(), writes=False):
                packed = PackedLinear(layer, quantization)
                before = layer.weight.nbytes
            _share_tables(packed.quant_state, tables)
            setattr(module, name, packed)
            yield before, sum(tensor.nbytes for tensor in (packed.weight, *_scales(packed.quant_state)))


def _find_read(model: PreTrainedModel) -> set[str]:
    """Find names of layers whose weight the model's own code reads, for its type or for another product than theirs."""
    functions = {
        function
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}
        # A whole model has rules for first weights.
        if not (issubclass(kind, PreTrainedModel) or kind.__module__.startswith(("torch.", "peft.")))
        for function in vars(kind).values()
        if inspect.isfunction(function)
    }
    read: set[str] = set()
    for function in functions:
        with suppress(OSError):  # without a file
            read.update(re.findall(r"(\w+)(?:\[\w+\])?\.weight\b", inspect.getsource(function)))
    return read


def _share_tables(state: Any, tables: dict[int, torch.Tensor]) -> None:
    """Put one tensor in the place of equal ones: each layer has its own of 1 KiB, which is much for a small one."""
    for one in (state, state.state2):
        one.code = tables.setdefault(len(one.code), one.code)


def _quantize_experts(
    model: PreTrainedModel, quantization: Quantization, layout: Partitioning
) -> Iterator[tuple[int, int]]:
    """Give bytes of the stacks of each module of experts, before and after."""
    found = [(module, stacks) for module in model.modules() if (stacks := find_stacks(module))]
    if not found or not run_by_products(model):
        return
    # With PEFT, which takes a second. It would add LoRA to the bytes.
    from hfdist.models.expert_factors import use_factors

    use_factors(model)
    levels = make_levels()
    for experts, stacks in found:
        with layout.gathered(stacks.values(), writes=False):
            before = sum(weights.nbytes for weights in stacks.values())
            pack_experts(experts, stacks, quantization, levels)
        yield before, sum(experts.get_parameter(name).nbytes for name in stacks)


def _tell_what_is_left(model: PreTrainedModel) -> None:
    """Say which frozen weights are not in 4 bits; a warning where they are most of them."""
    packed, left = packed_shapes(model), Counter[str]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter not in packed:
            left[re.sub(r"\.\d+(?=\.|$)", ".*", name)] += math.prod(whole_shape(parameter))
    whole = left.total() + sum(math.prod(shape) for shape in packed.values())
    largest = ", ".join(f"{name} ({size / whole:.0%})" for name, size in left.most_common(3))
    share = left.total() / max(whole, 1)
    logger.log(
        logging.WARNING if share > 0.5 else logging.INFO,
        "adapter.quantization: %.0f %% of the frozen weights stay as they are, since only linear layers, and experts"
        " that transformers computes, are packed: %s",
        100 * share,
        largest,
    )


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
            scales += _scales(state)
    for experts, name in _packed_stacks(module):
        packed = experts.get_parameter(name)
        if not isinstance(packed, DTensor):
            setattr(experts, name, _as_floats(packed))
    return scales


def _as_floats(packed: torch.Tensor) -> nn.Parameter:
    # Nobody reads further than what was packed.
    whole = functional.pad(packed.data.view(torch.uint8).flatten(), (0, -packed.nbytes % torch.float32.itemsize))
    return nn.Parameter(whole.view(torch.float32)[:, None], requires_grad=False)


def packed_shapes(model: nn.Module) -> dict[torch.Tensor, tuple[int, ...]]:
    """Give the shapes of what quantized parameters stand for, also of sharded ones: matrices, stacks of them."""
    layers = {packed: tuple(state.shape) for _, packed, state in _packed_layers(model)}
    stacks = {experts.get_parameter(name): list_packed(experts)[name].shape for experts, name in _packed_stacks(model)}
    return layers | stacks


def _packed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor, Any]]:
    """List layers of bitsandbytes with their weights and what these mean. It is kept with either of the two."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
        if weight is not None and state is not None:
            yield layer, weight, state


def _packed_stacks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """List modules of experts with the names of their packed stacks."""
    return ((experts, name) for experts in model.modules() for name in list_packed(experts))


def _scales(state: Any) -> list[torch.Tensor]:
    """Give what blocks of weights are multiplied with, and the numbers that codes stand for."""
    states = (state, state.state2) if state.nested else (state,)
    return [value for one in states for value in vars(one).values() if isinstance(value, torch.Tensor)]
