"""The parts of a model's blocks that an adapter stands beside: chosen by `adapter.target_parts`, and counted."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfdist.config.model import AdapterPart
from hfdist.errors import ConfigError
from hfdist.models.experts import mixture_of
from hfdist.models.partitioning import whole_shape

_KEY = "adapter.target_parts"
_MIXES_TOKENS = re.compile(r"attn|attention|mamba|conv|recurrent|temporal|delta|rwkv|lstm|mixer", re.IGNORECASE)
"""Names of what mixes tokens: attention, convolutions, recurrences."""
_IS_DENSE = re.compile(r"(mlp|ffn|feed_?forward|moe|moe_?block|shared_experts?)$", re.IGNORECASE)
"""Ends of names of feed-forward layers that each token meets."""
_WRAPPED = ".base_layer"
"""What PEFT adds to the name of a layer that it has wrapped."""


class Matrix(NamedTuple):
    """What LoRA gives one pair of factors, or a pair to each expert of a stack."""

    name: str
    """Of its module, or of the parameter itself where that is no linear layer."""
    part: AdapterPart
    is_module: bool


def find_matrices(model: PreTrainedModel) -> list[Matrix]:
    """List the matrices of the blocks, in the order of the model: of linear layers, stacks of experts and routers.

    Embeddings, the head and what else stands outside of blocks are not there; neither are convolutions.
    """
    found, parts = [], _Parts(model)
    head = model.get_output_embeddings()
    of_head = set() if head is None else set(head.modules())
    for name, module in model.named_modules():
        if module in of_head or re.search(r"\.\d+(\.|$)", name) is None or parts.is_read_by_kernel(name):
            continue
        part = parts.of(name)
        # Of some types a router is a linear layer that gives more than its product.
        is_plain = part is not AdapterPart.routers or type(module).forward is nn.Linear.forward
        if isinstance(module, (nn.Linear, Conv1D)) and is_plain:
            found.append(Matrix(name, part, True))
        elif part is AdapterPart.routers or parts.is_stack(name):
            # Of dbrx, stacks have two dimensions, and are read past the module that an adapter would be put around.
            dimensions = 2 if part is AdapterPart.routers else 3
            found += [
                Matrix(f"{name}.{own}", part, False)
                for own, parameter in module.named_parameters(recurse=False)
                if len(whole_shape(parameter)) == dimensions and "bias" not in own
            ]
    return found


def aim_at_parts(model: PreTrainedModel, peft_config: Any, parts: Collection[AdapterPart]) -> None:
    """Let an adapter's config target all matrices of these parts of a whole model; the config is changed in place.

    Names are as short as they can be without meaning another matrix, so that a saved adapter says them in a few words.

    Args:
        model: without an adapter.
        peft_config: a `peft.PeftConfig` that has `target_modules`; experts and routers need that of LoRA.
        parts: what is adapted.

    Raises:
        ConfigError: the model has nothing of one of the parts, or the type of adapter takes linear layers only.
    """
    matrices = find_matrices(model)
    _check_are_there(model, matrices, parts)
    chosen = [matrix for matrix in matrices if matrix.part in parts]
    modules = _shortest([m.name for m in chosen if m.is_module], [name for name, _ in model.named_modules()])
    parameters = [matrix.name for matrix in chosen if not matrix.is_module]
    if hasattr(peft_config, "target_parameters"):
        redirected = {name for name in modules if _is_taken_for_experts(name, model, peft_config)}
        modules -= redirected
        parameters += [f"{m.name}.weight" for m in chosen if m.is_module and _ends_in(m.name, redirected)]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        peft_config.target_parameters = sorted(_shortest(parameters, names))
    elif parameters:
        what = "experts and routers are no linear layers here, and of PEFT's types only LoRA goes with them"
        found = str(peft_config.peft_type.value).lower()
        raise ConfigError(what, where=f"{_KEY}, adapter.type", found=found, hint=f"adapter=lora {_KEY}={_words(parts)}")
    peft_config.target_modules = modules


def describe_parts(model: nn.Module) -> str:
    """Say which parts of the blocks an adapter in the model stands beside: matrices, and parameters that are trained.

    Args:
        model: whole, with an adapter.

    Returns:
        `attention 8 matrices, 4,096 parameters; experts 32 matrices, ...`. A stack has a matrix for each expert.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts, matrices, trained = _Parts(model), Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer) or not isinstance(module, nn.Module):
            continue
        own = sum(_numel(parameter) for parameter in _own_parameters(module))
        part = parts.of(name.replace(_WRAPPED, "")).value if re.search(r"\.\d+\.", name) else "other"
        matrices[part] += getattr(module, "num_experts", 1) if own else 0
        trained[part] += own
    rest = sum(_numel(p) for p in model.parameters() if p.requires_grad) - trained.total()
    words = [f"{part} {matrices[part]:,} matrices, {count:,} parameters" for part, count in trained.items() if count]
    return "; ".join([*words, *([f"trained besides {rest:,} parameters"] if rest else [])])


class _Parts:
    """Tells the part of a block that a module is in, by the names and classes of what it is in."""

    def __init__(self, model: nn.Module) -> None:
        # Of a layer with an adapter, which has one name more, the layer within comes last and stays.
        self._classes = {name.replace(_WRAPPED, ""): type(module).__name__ for name, module in model.named_modules()}
        experts = [name for name in self._classes if self._is_experts(name)]
        self._mixtures = set(map(mixture_of, experts))

    def of(self, name: str) -> AdapterPart:
        names = name.split(".")
        paths = [".".join(names[:end]) for end in range(1, len(names) + 1)]
        if self._mixtures and any("router" in own for own in names):
            return AdapterPart.routers
        if any(map(self._is_experts, paths)):
            return AdapterPart.experts
        for path, own in zip(reversed(paths), reversed(names), strict=True):
            if own == "gate" and path.rpartition(".")[0] in self._mixtures:
                return AdapterPart.routers
            # The layer itself has a name that says what it does for its owner.
            for text in (self._classes[path], own) if path != name else ():
                # In this order: names of classes begin with that of a type, such as RwkvFeedForward.
                if _IS_DENSE.search(text):
                    return AdapterPart.mlp
                if _MIXES_TOKENS.search(text):
                    return AdapterPart.attention
        return AdapterPart.mlp

    def is_stack(self, name: str) -> bool:
        """Whether the module has stacks of matrices, as shared experts of some types are."""
        return "Experts" in self._classes[name]

    def is_read_by_kernel(self, name: str) -> bool:
        """Whether the fused kernels of Mamba's layers read its weight past an adapter, so that PEFT refuses one."""
        owner, _, own = name.rpartition(".")
        return own == "out_proj" and "mamba" in self._classes[owner].lower()

    def _is_experts(self, path: str) -> bool:
        own = path.rpartition(".")[2]
        return "shared" not in own and (own == "experts" or "Experts" in self._classes[path])


def _check_are_there(model: PreTrainedModel, matrices: Sequence[Matrix], parts: Collection[AdapterPart]) -> None:
    there = [part for part in AdapterPart if any(matrix.part is part for matrix in matrices)]
    missing = [part for part in parts if part not in there]
    if missing:
        what = f"the model has no matrices of {', '.join(part.value for part in missing)} that an adapter could reach"
        found = f"{_words(parts)}, with {type(model).__name__}"
        kept = [part for part in parts if part in there] or there
        hint = f"{_KEY}={_words(kept)}"
        raise ConfigError(what, where=_KEY, found=found, allowed=", ".join(p.value for p in there), hint=hint)


def _is_taken_for_experts(name: str, model: PreTrainedModel, peft_config: Any) -> bool:
    """Whether PEFT takes a layer's name for one of the experts.

    In types whose experts were once linear layers it does so with names like down_proj, also of other layers. The
    weight of such a layer can be named as a parameter.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    tried = copy.deepcopy(peft_config)
    tried.target_modules = {name}
    try:
        convert_peft_config_for_transformers(tried, model, None)
    except ValueError:
        # It would want others of the experts, too.
        return True
    return name not in tried.target_modules


def _shortest(names: Sequence[str], everything: Sequence[str]) -> set[str]:
    """Give the shortest ends of names by which these are named, and nothing else."""
    chosen, found = set(names), set[str]()
    ends = Counter(end for name in everything if name not in chosen for end in _ends(name))
    for name in names:
        if not _ends_in(name, found):
            found.add(next(end for end in _ends(name) if end not in ends or end == name))
    return found


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))


def _ends_in(name: str, ends: Collection[str]) -> bool:
    return any(end in ends for end in _ends(name))


def _own_parameters(layer: nn.Module) -> Iterator[torch.Tensor]:
    """List what an adapter trains beside one layer; the layer within may have an adapter of its own."""
    return (p for name, p in layer.named_parameters() if p.requires_grad and not name.startswith(_WRAPPED[1:]))


def _numel(parameter: torch.Tensor) -> int:
    return math.prod(whole_shape(parameter))


def _words(parts: Collection[AdapterPart]) -> str:
    return f"[{','.join(part.value for part in parts)}]"
