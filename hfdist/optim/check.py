"""Refuses optimizers that would train otherwise in a layout than on one process."""

from __future__ import annotations

import torch
from torch import nn

from hfdist.errors import ConfigError
from hfdist.optim.joined import Joined
from hfdist.optim.probe import Reach, probe_optimizer

_LAYOUTS = {
    Reach.parameter: "any layout without a parameter server",
    Reach.model: "a layout that keeps the model whole: one process, or ddp",
}
"""Layouts that give an optimizer whole what its updates depend on."""


def check(optimizer: torch.optim.Optimizer, sees: Reach, *, is_saved: bool) -> None:
    """Refuse an optimizer that would not train as on one process, or whose state no checkpoint could hold.

    Args:
        optimizer: an optimizer before its first step.
        sees: the widest reach of an update that the layout allows: what it gives the optimizer whole.
        is_saved: whether the run saves checkpoints.

    Raises:
        ConfigError: the optimizer does not fit, with the reason.
    """
    answer = probe_optimizer(optimizer)
    where = "optimizer.name, optim or optimizers"
    if answer.reach > sees:
        raise ConfigError(
            "this optimizer does not train in this layout as it does on one process",
            where=where,
            found=f"{describe(optimizer)}: {answer.why}",
            allowed=_LAYOUTS[answer.reach],
            hint="strategy=ddp (sharding='none'), or an optimizer that works element by element, such as adamw",
        )
    if is_saved and answer.not_saved:
        raise ConfigError(
            "no checkpoint can hold what this optimizer keeps",
            where=where,
            found=f"{describe(optimizer)}: {answer.not_saved}",
            allowed="numbers and tensors for each parameter",
            hint="save_strategy='no' (checkpoint=none), or another optimizer",
        )


def check_steps_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that does not step all trained parameters.

    ZeRO needs this: there the norm, by which gradients are clipped, has only those of the stepped parameters.

    Raises:
        ConfigError: the optimizer leaves trained parameters out.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    left_out = [name for name, parameter in trained if id(parameter) not in stepped]
    if left_out:
        raise ConfigError(
            "gradients are clipped by the norm over all trained parameters, and DeepSpeed knows only those that the "
            "optimizer steps",
            where="optimizers, or create_optimizer",
            found=f"{describe(optimizer)} without {len(left_out)} of them, such as {left_out[0]}",
            hint="parameter.requires_grad_(False) for those that it leaves out, or a strategy without sharding",
        )


def describe(optimizer: object) -> str:
    """Name the class of an optimizer, or those that it joins, without wrappers such as Accelerate's around it."""
    while not isinstance(optimizer, Joined) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return repr(optimizer) if isinstance(optimizer, Joined) else type(optimizer).__name__
