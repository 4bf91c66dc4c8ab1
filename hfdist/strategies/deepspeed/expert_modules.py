"""ZeRO-3 of experts that are modules, and not stacks: all of a block are gathered together.

A module gathers its weights when it runs, and an expert runs where a token reaches it. So ranks would wait for each
other in gathers of different experts. DeepSpeed calls what it gathers at once a leaf.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def gather_experts_together(model: nn.Module) -> None:
    """Mark what holds experts as leaves of ZeRO-3, before DeepSpeed gets the model; others stay as they are."""
    leaves = find_expert_modules(model)
    if not leaves:
        return
    from deepspeed.utils import set_z3_leaf_modules_by_name

    set_z3_leaf_modules_by_name(model, leaves)
    largest = 0
    for name in leaves:
        module = model.get_submodule(name)
        sizes = [getattr(p, "ds_numel", p.numel()) * p.element_size() for p in module.parameters()]
        largest = max(largest, sum(sizes))
    logger.info(
        "ZeRO-3: experts are modules of their own here, so all of a block are gathered together: %.1f MiB at a time",
        largest / 2**20,
    )


def find_expert_modules(model: nn.Module) -> list[str]:
    """Name the modules that call experts which are modules: the collection, or its owner where it has no forward."""
    found = []
    for name, module in model.named_modules():
        owner, _, own = name.rpartition(".")
        is_collection = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
        if is_collection and own == "experts":
            found.append(owner if type(module).forward is nn.Module.forward else name)
    return found


def let_gradients_reach(model: nn.Module) -> None:
    """Let a backward come to the inputs of all leaves, in place; of some mixtures DeepSpeed marks leaves itself.

    It takes the gradients of a leaf's weights when that of its input is there. In front of a first block whose experts
    alone are trained, nothing has one: it would take them before they are computed.
    """
    from deepspeed.utils import get_z3_leaf_modules

    for module in get_z3_leaf_modules(model):
        module.register_forward_pre_hook(_with_gradients, with_kwargs=True)


def _with_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = next(iter((*args, *kwargs.values())))
    if torch.is_grad_enabled() and not states.requires_grad:
        states.requires_grad_()
