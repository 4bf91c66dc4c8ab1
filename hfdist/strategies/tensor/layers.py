"""Which layers of any model can be divided over tensor ranks: its vocabulary, and the linear layers of its blocks."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from contextlib import suppress
from functools import cache

from torch import nn
from transformers import PreTrainedModel

from hfdist.models.blocks import find_block_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.strategies.tensor.linear import GATHERED, LOOKED_UP, split_dimensions


def split_vocabulary(model: PreTrainedModel, num_ranks: int) -> dict[str, str]:
    """Give the names and styles of the embedding and of the head, where their rows can be divided."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    undivided = []
    for module, style in ((input_embeddings(model), LOOKED_UP), (model.get_output_embeddings(), GATHERED)):
        weight = getattr(module, "weight", None)
        if module is None or weight is None or id(module) not in names:
            continue
        if split_dimensions(module, style) and len(weight) >= num_ranks:
            found[names[id(module)]] = style
        else:
            undivided.append(weight)
    # Tied to what stays whole, it stays whole, too.
    is_tied = any(model.get_submodule(name).weight is weight for name in found for weight in undivided)
    return {} if is_tied else found


def kept_whole(model: PreTrainedModel, of_vocabulary: dict[str, str]) -> set[int]:
    """Give the ids of parameters of the head, of what several modules share, and of the divided vocabulary."""
    num_names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    apart = [model.get_output_embeddings(), *map(model.get_submodule, of_vocabulary)]
    of_head = {id(parameter) for module in apart if module is not None for parameter in module.parameters()}
    return of_head | {parameter for parameter, count in num_names.items() if count > 1}


def gather_blocks(model: PreTrainedModel, num_ranks: int, whole: set[int]) -> dict[str, str]:
    """Give the names and styles of all linear layers of the blocks that are only called; with LoRA the model's own.

    Raises:
        ConfigError: there is no list of blocks.
    """
    names = {id(module): name for name, module in model.named_modules()}
    apart: set[int] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            apart |= set(map(id, module.modules())) - (set(map(id, base.modules())) if is_lora(module) else set())
        read = _read_weights(type(module))  # type: ignore[arg-type]  # mypy finds that Module has another __hash__
        apart |= {id(child) for name, child in module.named_children() if name in read}
    return {
        names[id(module)]: GATHERED
        for parts in find_block_parts(model)
        for part in parts
        for module in part.modules()
        if id(module) not in apart
        and whole.isdisjoint(map(id, module.parameters(recurse=False)))
        and any(
            getattr(module, name).shape[dim] >= num_ranks for name, dim in split_dimensions(module, GATHERED).items()
        )
    }


def is_lora(module: object) -> bool:
    """Whether an adapted layer only adds a product of two matrices; other adapters read the weight that they adapt."""
    return hasattr(module, "lora_A") and not any(getattr(module, "use_dora", {}).values())


@cache
def _read_weights(kind: type[nn.Module]) -> set[str]:
    """Give the names of children with whose weight a class computes itself, as kernels for GPUs do."""
    read: set[str] = set()
    # Function by function: Python finds a function's source at once, but parses the whole file for a class.
    for function in filter(inspect.isfunction, vars(kind).values()):
        with suppress(OSError):  # without a file
            source = inspect.getsource(function)
            read.update(re.findall(r"\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device))", source))
    return read
