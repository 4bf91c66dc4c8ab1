"""The parts of a model's blocks that an adapter stands beside: chosen by `adapter.target_parts`, and counted.

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
"""Names of what mixes tokens: attention, convolutions, recurrences."""
_IS_DENSE = re.compile(r"(mlp|ffn|feed_?forward|moe|moe_?block|shared_experts?)$", re.IGNORECASE)
"""Ends of names of feed-forward layers that each token meets."""
_WRAPPED = "base_layer"
"""What PEFT calls the layer within one that it has wrapped."""


class Matrix(NamedTuple):
    """What LoRA gives one pair of factors, or a pair to each expert of a stack."""

    name: str
    """Name of its module, or of the parameter itself where that is no linear layer."""
    part: AdapterPart
    is_module: bool
    """Whether it is a linear layer, and not a parameter of another module."""


def find_matrices(model: PreTrainedModel) -> list[Matrix]:
    """List the matrices of the blocks, in the order of the model: of linear layers, stacks of experts and routers.

    Embeddings, the head and what else stands outside of blocks are not there; neither are convolutions.
    """
    found, parts = [], _Parts(model)
    head = model.get_output_embeddings()
    head_modules = set() if head is None else set(head.modules())
    for name, module in model.named_modules():
        if module in head_modules or not _is_in_block(name) or parts.is_read_by_kernel(name):
            continue
        part = parts.part_of(name)
        # In some types a router is a linear layer that gives more than its product.
        gives_product = part is not AdapterPart.routers or type(module).forward is nn.Linear.forward
        if isinstance(module, (nn.Linear, Conv1D)) and gives_product:
            found.append(Matrix(name, part, True))
        elif part is AdapterPart.routers or parts.is_stack(name):
            # dbrx has stacks of two dimensions: it reads them past the module that an adapter would be put around.
            dimensions = 2 if part is AdapterPart.routers else 3
            found += [
                Matrix(f"{name}.{word}", part, False)
                for word, parameter in module.named_parameters(recurse=False)
                if len(whole_shape(parameter)) == dimensions and "bias" not in word
            ]
    return found


def aim_at_parts(model: PreTrainedModel, peft_config: PeftConfig, parts: Collection[AdapterPart]) -> None:
    """Let an adapter's config target all matrices of these parts of a whole model; the config is changed in place.

    Names are as short as they can be without meaning another matrix, so that a saved adapter says them in a few words.

    Args:
        model: without an adapter.
        peft_config: one that has `target_modules`; experts and routers need that of LoRA.
        parts: what is adapted.

    Raises:
        ConfigError: the model has nothing of one of the parts, or the type of adapter takes linear layers only.
    """
    matrices = find_matrices(model)
    _check_are_there(model, matrices, parts)
    chosen = [matrix for matrix in matrices if matrix.part in parts]
    modules = _shortest([m.name for m in chosen if m.is_module], [name for name, _ in model.named_modules()])
    parameters = [matrix.name for matrix in chosen if not matrix.is_module]
    # What `PeftConfig` does not declare: its classes for single types have these fields.
    fields = vars(peft_config)
    if "target_parameters" in fields:
        taken = {name for name in modules if _is_taken_for_experts(name, model, peft_config)}
        modules -= taken
        parameters += [f"{m.name}.weight" for m in chosen if m.is_module and _ends_in(m.name, taken)]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        fields["target_parameters"] = sorted(_shortest(parameters, names))
    elif parameters:
        what = "experts and routers are no linear layers here, and of PEFT's types only LoRA goes with them"
        found = str(getattr(peft_config.peft_type, "value", "")).lower()
        raise ConfigError(what, where=f"{_KEY}, adapter.type", found=found, hint=f"adapter=lora {_KEY}={_words(parts)}")
    fields["target_modules"] = modules


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
        # The layer within may have an adapter of its own.
        num_trained = sum(
            _numel(parameter)
            for word, parameter in module.named_parameters()
            if parameter.requires_grad and not word.startswith(_WRAPPED)
        )
        part = parts.part_of(_unwrapped(name)).value if _is_in_block(name) else "other"
        matrices[part] += getattr(module, "num_experts", 1) if num_trained else 0
        trained[part] += num_trained
    rest = sum(_numel(p) for p in model.parameters() if p.requires_grad) - trained.total()
    words = [f"{part} {matrices[part]:,} matrices, {count:,} parameters" for part, count in trained.items() if count]
    return "; ".join([*words, *([f"trained besides {rest:,} parameters"] if rest else [])])


class _Parts:
    """Tells the part of a block that a module is in, by the names and classes of what it is in."""

    def __init__(self, model: nn.Module) -> None:
        # A layer with an adapter has two modules of one name here: the layer within comes last, and stays.
        self._classes = {_unwrapped(name): type(module).__name__ for name, module in model.named_modules()}
        experts = [name for name in self._classes if self._is_experts(name)]
        self._mixtures = set(map(mixture_of, experts))

    def part_of(self, name: str) -> AdapterPart:
        """Give the part of a module: routers, experts, or what the nearest module around it says that it does.

        Where none says anything, it is mlp: what mixes tokens is named so.
        """
        words = name.split(".")
        paths = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        if self._mixtures and any("router" in word for word in words):
            return AdapterPart.routers
        if any(map(self._is_experts, paths)):
            return AdapterPart.experts
        for path in reversed(paths):
            owner, _, word = path.rpartition(".")
            if word == "gate" and owner in self._mixtures:
                return AdapterPart.routers
            if path == name:
                # A layer has a name that says what it does for the module around it.
                continue
            for text in (self._classes[path], word):
                # Dense comes first: names of classes begin with that of a type, such as RwkvFeedForward.
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
        owner, _, word = name.rpartition(".")
        return word == "out_proj" and "mamba" in self._classes[owner].lower()

    def _is_experts(self, path: str) -> bool:
        word = path.rpartition(".")[2]
        return "shared" not in word and (word == "experts" or "Experts" in self._classes[path])


def _is_in_block(name: str) -> bool:
    """Whether a module is in a list of modules, or one of its members."""
    return re.search(r"\.\d+(\.|$)", name) is not None


def _unwrapped(name: str) -> str:
    """Give the name that a module has without an adapter."""
    return name.replace(f".{_WRAPPED}", "")


def _check_are_there(model: PreTrainedModel, matrices: Sequence[Matrix], parts: Collection[AdapterPart]) -> None:
    there = [part for part in AdapterPart if any(matrix.part is part for matrix in matrices)]
    missing = [part for part in parts if part not in there]
    if missing:
        what = f"the model has no matrices of {', '.join(part.value for part in missing)} that an adapter could reach"
        found = f"{_words(parts)}, with {type(model).__name__}"
        kept = [part for part in parts if part in there] or there
        hint = f"{_KEY}={_words(kept)}"
        raise ConfigError(what, where=_KEY, found=found, allowed=", ".join(p.value for p in there), hint=hint)


def _is_taken_for_experts(name: str, model: PreTrainedModel, peft_config: PeftConfig) -> bool:
    """Whether PEFT takes a layer's name for one of the experts.

    In types whose experts were once linear layers it does so with names like down_proj, also of other layers. The
    weight of such a layer can be named as a parameter.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    tried = copy.deepcopy(peft_config)
    vars(tried)["target_modules"] = {name}
    try:
        convert_peft_config_for_transformers(tried, model, None)
    except ValueError:
        # It would want others of the experts, too.
        return True
    return name not in vars(tried)["target_modules"]


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


def _numel(parameter: torch.Tensor) -> int:
    return math.prod(whole_shape(parameter))


def _words(parts: Collection[AdapterPart]) -> str:
    return f"[{','.join(part.value for part in parts)}]"
