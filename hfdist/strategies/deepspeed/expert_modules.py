"""ZeRO-3 of experts that are modules, and not stacks: all of a block are gathered together.

A module gathers its weights when it runs, and an expert runs where a token reaches it. So ranks would wait for each
other in gathers of different experts. DeepSpeed calls what it gathers at once a leaf.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn

from hfdist.models.partitioning import whole_shape

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
        sizes = [math.prod(whole_shape(p)) * p.element_size() for p in module.parameters()]
        largest = max(largest, sum(sizes))
    logger.info(
        "ZeRO-3: experts are modules of their own here, so all of a block are gathered together: %.1f MiB at a time",
        largest / 2**20,
    )


def find_expert_modules(model: nn.Module) -> list[str]:
    """Name the modules that call experts which are modules: the collection, or its owner where it has no forward."""
    found = []
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        is_collection = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
        if is_collection and last == "experts":
            found.append(owner if type(module).forward is nn.Module.forward else name)
    return found


def let_gradients_reach(model: nn.Module) -> None:
    """Let each backward reach the inputs of leaves that are trained, in place; DeepSpeed itself marks some mixtures'.

    DeepSpeed takes the gradients of a leaf's weights when that of its input is there. If experts alone are trained, the
    input of the first block has none: DeepSpeed would take the gradients before they are computed.
    """
    from deepspeed.utils import get_z3_leaf_modules

    for module in get_z3_leaf_modules(model):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            continue
        module.register_forward_pre_hook(_with_gradients, with_kwargs=True)


def _with_gradients(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_requiring_gradient(args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: _requiring_gradient(kwargs[first])}


def _requiring_gradient(states: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled() or states.requires_grad:
        return states
    # No leaf of autograd: some blocks change it in place.
    return states.detach().requires_grad_().clone()
