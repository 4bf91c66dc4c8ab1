"""The matrices of a model's blocks that an adapter stands beside: chosen by their part in a block, and counted.

part        names of such matrices
attention   model.layers.0.self_attn.q_proj, of Mamba backbone.layers.0.mixer.in_proj
mlp         model.layers.0.mlp.up_proj, model.layers.0.mlp.shared_experts.up_proj
experts     model.layers.0.mlp.experts.gate_up_proj
routers     model.layers.0.mlp.gate, of dbrx transformer.blocks.0.ffn.router.layer
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfdist.config.model import AdapterPart
from hfdist.errors import ConfigError
from hfdist.models.experts import mixture_of
from hfdist.models.partitioning import whole_shape

if TYPE_CHECKING:
    from peft import PeftConfig

_KEY = "adapter.target_parts"
_MIXES_TOKENS = re.compile(r"attn|attention|mamba|conv|recurrent|temporal|delta|rwkv|lstm|mixer", re.IGNORECASE)
"""Words in names of modules that mix tokens: attention, convolutions, recurrences."""
_IS_DENSE = re.compile(r"(mlp|ffn|feed_?forward|moe|moe_?block|shared_experts?)$", re.IGNORECASE)
"""Ends of names of feed-forward layers that each token meets."""
_WRAPPED = "base_layer"
"""PEFT's name for the layer inside of one with an adapter."""


class Matrix(NamedTuple):
    """A matrix to which LoRA gives a pair of factors, or a stack of matrices, each of which gets a pair."""

    name: str
    """Name of the linear layer, or of the parameter where its module is no linear layer."""
    part: AdapterPart
    """The part of a block to which the matrix belongs."""
    is_module: bool
    """Whether the name is that of a linear layer, and not of a parameter."""


def find_matrices(model: PreTrainedModel) -> list[Matrix]:
    """List the matrices of the blocks, in the order of the model: of linear layers, stacks of experts and routers.

    Embeddings, the head and all else outside of blocks are left out; so are convolutions.
    """
    matrices, parts = [], _Parts(model)
    head = model.get_output_embeddings()
    head_modules = set() if head is None else set(head.modules())
    for name, module in model.named_modules():
        if module in head_modules or not _is_in_block(name) or parts.is_read_by_kernel(name):
            continue
        part = parts.part_of(name)
        # In some types a router is a linear layer that gives more than its product, so no adapter can wrap it.
        gives_product = part is not AdapterPart.routers or type(module).forward is nn.Linear.forward
        if isinstance(module, (nn.Linear, Conv1D)) and gives_product:
            matrices.append(Matrix(name, part, is_module=True))
        elif part is AdapterPart.routers or parts.is_stack(name):
            # The stacks of dbrx have two dimensions, and are read past the module that an adapter would wrap.
            dimensions = 2 if part is AdapterPart.routers else 3
            matrices += [
                Matrix(f"{name}.{own_name}", part, is_module=False)
                for own_name, parameter in module.named_parameters(recurse=False)
                if len(whole_shape(parameter)) == dimensions and "bias" not in own_name
            ]
    return matrices


def aim_at_parts(model: PreTrainedModel, peft_config: PeftConfig, parts: Collection[AdapterPart]) -> None:
    """Let an adapter's config target all matrices of these parts of a whole model; the config is changed in place.

    Names are as short as they can be without meaning another matrix, so that a saved adapter says them in a few words.

    Args:
        model: a whole model without an adapter.
        peft_config: a config with the field `target_modules`; experts and routers need LoRA's.
        parts: the parts of blocks whose matrices are adapted.

    Raises:
        ConfigError: the model has nothing of one of the parts, or the type of adapter takes linear layers only.
    """
    matrices = find_matrices(model)
    _check_are_there(model, matrices, parts)
    chosen = [matrix for matrix in matrices if matrix.part in parts]
    modules = _shortest([m.name for m in chosen if m.is_module], [name for name, _ in model.named_modules()])
    parameters = [matrix.name for matrix in chosen if not matrix.is_module]
    # `PeftConfig` does not declare these fields: only its subclasses for some types have them.
    fields = vars(peft_config)
    if "target_parameters" in fields:
        # Layers that PEFT would take for experts are named by their weight instead.
        taken = {name for name in modules if _is_taken_for_experts(name, model, peft_config)}
        modules -= taken
        parameters += [f"{m.name}.weight" for m in chosen if m.is_module and _ends_in(m.name, taken)]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        fields["target_parameters"] = sorted(_shortest(parameters, names))
    elif parameters:
        what = "experts and routers are no linear layers here, and of PEFT's types only LoRA goes with them"
        found = str(getattr(peft_config.peft_type, "value", "")).lower()
        raise ConfigError(
            what, where=f"{_KEY}, adapter.type", found=found, hint=f"adapter=lora {_KEY}={_in_brackets(parts)}"
        )
    fields["target_modules"] = modules


def describe_parts(model: nn.Module) -> str:
    """Describe the adapter in a model: for each part of the blocks its matrices, and the parameters that are trained.

    Args:
        model: a whole model with an adapter.

    Returns:
        `attention 8 matrices, 4,096 parameters; experts 32 matrices, ...`. A stack counts a matrix for each expert.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts, matrices, trained = _Parts(model), Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer) or not isinstance(module, nn.Module):
            continue
        # The layer inside may have an adapter of its own, and is visited by itself.
        num_trained = sum(
            _numel(parameter)
            for own_name, parameter in module.named_parameters()
            if parameter.requires_grad and not own_name.startswith(_WRAPPED)
        )
        part = parts.part_of(_unwrapped(name)).value if _is_in_block(name) else "other"
        if num_trained:
            matrices[part] += getattr(module, "num_experts", 1)
            trained[part] += num_trained
    described = [f"{part} {matrices[part]:,} matrices, {count:,} parameters" for part, count in trained.items()]
    rest = sum(_numel(p) for p in model.parameters() if p.requires_grad) - trained.total()
    if rest:
        described.append(f"trained besides {rest:,} parameters")
    return "; ".join(described)


class _Parts:
    """Tells the part of a block that a module is in, by the names and classes of what it is in."""

    def __init__(self, model: nn.Module) -> None:
        # A layer with an adapter and the layer inside have one unwrapped name. The layer inside comes last: its class
        # stays.
        self._classes = {_unwrapped(name): type(module).__name__ for name, module in model.named_modules()}
        experts = [name for name in self._classes if self._is_experts(name)]
        self._mixtures = set(map(mixture_of, experts))

    def part_of(self, name: str) -> AdapterPart:
        """Give the part of a block that the module `name` is in.

            model.layers.0.self_attn.q_proj     the nearest module around it that says what it does: self_attn

        Where no module around it says so, the part is mlp: modules that mix tokens are named for it.
        """
        own_names = name.split(".")
        paths = [".".join(own_names[:end]) for end in range(1, len(own_names) + 1)]
        if self._mixtures and any("router" in own_name for own_name in own_names):
            return AdapterPart.routers
        if any(map(self._is_experts, paths)):
            return AdapterPart.experts
        for path in reversed(paths):
            owner, _, own_name = path.rpartition(".")
            if own_name == "gate" and owner in self._mixtures:
                return AdapterPart.routers
            if path == name:
                # The layer's own name says what it does for the module around it, not which part that is.
                continue
            for text in (self._classes[path], own_name):
                # Dense first: the class RwkvFeedForward has the name of its type in it, which is a word for mixing.
                if _IS_DENSE.search(text):
                    return AdapterPart.mlp
                if _MIXES_TOKENS.search(text):
                    return AdapterPart.attention
        return AdapterPart.mlp

    def is_stack(self, name: str) -> bool:
        """Whether the module holds stacks of matrices, by its class; shared experts of some types do, too."""
        return "Experts" in self._classes[name]

    def is_read_by_kernel(self, name: str) -> bool:
        """Whether a fused kernel of Mamba reads the layer's weight past an adapter, so that PEFT refuses one there."""
        owner, _, own_name = name.rpartition(".")
        return own_name == "out_proj" and "mamba" in self._classes[owner].lower()

    def _is_experts(self, path: str) -> bool:
        """Whether a module holds routed experts, by its own name or its class."""
        _, _, own_name = path.rpartition(".")
        return "shared" not in own_name and (own_name == "experts" or "Experts" in self._classes[path])


def _is_in_block(name: str) -> bool:
    """Whether a module is a member of a list of modules, or inside of one: such names have a number."""
    return re.search(r"\.\d+(\.|$)", name) is not None


def _unwrapped(name: str) -> str:
    """Give the name that a module has without an adapter."""
    return name.replace(f".{_WRAPPED}", "")


def _check_are_there(model: PreTrainedModel, matrices: Sequence[Matrix], parts: Collection[AdapterPart]) -> None:
    """Refuse parts of which the model has no matrix."""
    there = [part for part in AdapterPart if any(matrix.part is part for matrix in matrices)]
    missing = [part for part in parts if part not in there]
    if missing:
        what = f"the model has no matrices of {', '.join(part.value for part in missing)} that an adapter could reach"
        found = f"{_in_brackets(parts)}, with {type(model).__name__}"
        kept = [part for part in parts if part in there] or there
        hint = f"{_KEY}={_in_brackets(kept)}"
        raise ConfigError(what, where=_KEY, found=found, allowed=", ".join(p.value for p in there), hint=hint)


def _is_taken_for_experts(name: str, model: PreTrainedModel, peft_config: PeftConfig) -> bool:
    """Whether PEFT takes a layer's name for one of the experts.

    In types whose experts were once linear layers, PEFT does so with names like down_proj, even of other layers.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    tried = copy.deepcopy(peft_config)
    vars(tried)["target_modules"] = {name}
    try:
        convert_peft_config_for_transformers(tried, model, None)
    except ValueError:
        # PEFT would want the other matrices of the experts, too.
        return True
    return name not in vars(tried)["target_modules"]


def _shortest(names: Sequence[str], everything: Sequence[str]) -> set[str]:
    """Give the shortest ends by which `names` can be told from all other names of `everything`."""
    chosen, shortest = set(names), set[str]()
    ends_of_others = {end for name in everything if name not in chosen for end in _ends(name)}
    for name in names:
        if not _ends_in(name, shortest):
            shortest.add(next(end for end in _ends(name) if end not in ends_of_others or end == name))
    return shortest


def _ends(name: str) -> Iterator[str]:
    """Give the ends of a dotted name, the shortest first: of `a.b.c` these are `c`, `b.c` and `a.b.c`."""
    own_names = name.split(".")
    return (".".join(own_names[start:]) for start in range(len(own_names) - 1, -1, -1))


def _ends_in(name: str, ends: Collection[str]) -> bool:
    """Whether a dotted name has one of these ends."""
    return any(end in ends for end in _ends(name))


def _numel(parameter: torch.Tensor) -> int:
    """Count the elements of a parameter, also of one that ZeRO-3 has partitioned."""
    return math.prod(whole_shape(parameter))


def _in_brackets(parts: Collection[AdapterPart]) -> str:
    """Write parts as a value of `adapter.target_parts`."""
    return f"[{','.join(part.value for part in parts)}]"
