"""Puts the frozen weights beside an adapter in 4 bits: `adapter.quantization` (QLoRA, Dettmers et al. 2023).

Linear layers and stacks of experts are quantized one by one, once a rank has no more than its own blocks. Each rank
does so by itself: the codes follow from the weights alone. Names of weights stay, and the adapter is saved without the
weights, so checkpoints and merged models are those of LoRA.
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
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.collectives import on_all_ranks
from hfdist.config.model import Quantization
from hfdist.errors import ConfigError
from hfdist.models.packed_experts import find_stacks, make_levels, pack_experts
from hfdist.models.packed_weights import PackedLinear, packed_shapes, scales_of
from hfdist.models.partitioning import WHOLE, Partitioning, whole_shape
from hfdist.models.stacked_experts import run_by_products

logger = logging.getLogger(__name__)

_WRAPPED = "base_layer"
"""What PEFT calls a layer beside which it puts LoRA."""


def check_installed(quantization: Quantization) -> None:
    """Check that bitsandbytes is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        what, hint = "weights of 4 bits need a package that is not installed", "pip install 'hfdist[qlora]'"
        raise ConfigError(what, where="adapter.quantization", found=quantization.value, hint=hint)


def quantize_frozen(model: PreTrainedModel, quantization: Quantization, layout: Partitioning = WHOLE) -> None:
    """Quantize the frozen linear layers of a model, all but its head, and its frozen stacks of experts; in place.

    A collective. ZeRO-3 partitions the packed weights when DeepSpeed gets the model; until then they are whole on each
    rank.

    Args:
        model: a model that `layout` has partitioned.
        quantization: the type of 4 bits.
        layout: how the model is partitioned.

    Raises:
        ConfigError: no rank has a weight to quantize; it is raised on all ranks.
        HfdistError: one rank has failed, as where it has no memory left; on all ranks alike.
    """
    sizes: list[_Bytes] = []

    def quantize() -> bool:
        sizes.extend(_quantize_layers(model, quantization, layout))
        sizes.extend(_quantize_experts(model, quantization, layout))
        return bool(sizes)

    # A stage of a pipeline may have none.
    if not any(on_all_ranks(quantize)):
        what = "the model has no frozen linear layer of torch.nn.Linear, and no stack of experts, to quantize"
        found = f"{quantization.value}, with {type(model).__name__}"
        raise ConfigError(what, where="adapter.quantization", found=found, hint="adapter=lora")
    _copy_from_files(model)
    before = sum(size.before for size in sizes)
    after = sum(size.after for size in sizes)
    logger.info("adapter.quantization: frozen weights take %.1f MB in place of %.1f", after / 1e6, before / 1e6)
    _tell_what_is_left(model)


def _copy_from_files(model: PreTrainedModel) -> None:
    """Copy frozen weights that were not quantized: a whole file stays in memory while one tensor is a view of it."""
    packed = packed_shapes(model)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter not in packed and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


class _Bytes(NamedTuple):
    """Memory of quantized weights, in bytes."""

    before: int
    after: int


def _quantize_layers(model: PreTrainedModel, quantization: Quantization, layout: Partitioning) -> Iterator[_Bytes]:
    """Quantize frozen linear layers one by one, and give the memory of each."""
    head, read = model.get_output_embeddings(), _find_read_layers(model)
    tables: dict[int, torch.Tensor] = {}
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            # A subclass may have another forward. A layer of another pipeline stage has no weight here.
            if type(layer) is not nn.Linear or layer is head or layer.weight is None or layer.weight.requires_grad:
                continue
            _, _, parent_name = path.rpartition(".")
            name_in_code = parent_name if name == _WRAPPED else name
            if name_in_code in read:
                continue
            with layout.gathered(layer.parameters(), writes=False):
                packed = PackedLinear(layer, quantization)
                before = layer.weight.nbytes
            _share_tables(packed.quant_state, tables)
            setattr(module, name, packed)
            yield _Bytes(before, sum(tensor.nbytes for tensor in (packed.weight, *scales_of(packed.quant_state))))


def _find_read_layers(model: PreTrainedModel) -> set[str]:
    """Name the layers whose weight the model's own code reads, for its type or for a product of its own.

    The source of all classes in the model is searched for `NAME.weight`: such code could not read packed bytes.
    """
    classes = {owner for module in model.modules() for owner in type(module).__mro__}
    read: set[str] = set()
    for owner in classes:
        # A PreTrainedModel reads weights to draw first values, which are there already.
        if issubclass(owner, PreTrainedModel) or owner.__module__.startswith(("torch.", "peft.")):
            continue
        for function in filter(inspect.isfunction, vars(owner).values()):
            with suppress(OSError):  # a function that was made without a file
                read.update(re.findall(r"(\w+)(?:\[\w+\])?\.weight\b", inspect.getsource(function)))
    return read


def _share_tables(state: Any, tables: dict[int, torch.Tensor]) -> None:
    """Let layers share equal tables of codes: each has its own of 1 KiB, which is much beside a small layer."""
    for level in (state, state.state2):
        level.code = tables.setdefault(len(level.code), level.code)


def _quantize_experts(model: PreTrainedModel, quantization: Quantization, layout: Partitioning) -> Iterator[_Bytes]:
    """Quantize the frozen stacks of each module of experts, and give their memory."""
    stacks_of = {module: find_stacks(module) for module in model.modules()}
    stacks_of = {module: stacks for module, stacks in stacks_of.items() if stacks}
    if not stacks_of or not run_by_products(model):
        return
    # PEFT alone would add LoRA to the bytes. Its import takes a second.
    from hfdist.models.expert_factors import use_factors

    use_factors(model)
    levels = make_levels()
    for experts, stacks in stacks_of.items():
        with layout.gathered(stacks.values(), writes=False):
            before = sum(weights.nbytes for weights in stacks.values())
            pack_experts(experts, stacks, quantization, levels)
        yield _Bytes(before, sum(experts.get_parameter(name).nbytes for name in stacks))


def _tell_what_is_left(model: PreTrainedModel) -> None:
    """Log which frozen weights are not in 4 bits; a warning if that is more than half of them."""
    packed = packed_shapes(model)
    # Elements by name, with `*` in place of the numbers of blocks.
    left = Counter[str]()
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
