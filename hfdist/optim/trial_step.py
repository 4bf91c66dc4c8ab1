"""Steps of an optimizer over other tensors than its own, which leave it and the generators as they are."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hfdist.kept_generators import keeping_generators
from hfdist.optim.joined import Group, groups_by_optimizer

_RATE = 1e-2
"""Rate of all such steps."""


def over(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> torch.optim.Optimizer:
    """Give an optimizer of the same class and settings over other groups of tensors, without any state."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    settings = {
        name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in vars(optimizer).items()
    }
    # A schedule or a loss scaler puts a step of its own there, bound to the original.
    settings.pop("step", None)
    # Hooks are the user's, and not for such steps.
    settings |= {name: type(value)() for name, value in settings.items() if name.endswith("_hooks")}
    vars(other).update(settings)
    other.param_groups = [copy.copy(group) for group in groups]
    other.state = defaultdict(dict, _state_of_construction(optimizer, other.param_groups))
    return other


def _state_of_construction(
    optimizer: torch.optim.Optimizer, groups: list[Group]
) -> dict[torch.Tensor, dict[str, object]]:
    """The state that its constructor makes, as Adagrad's does; most make none before their first step."""
    state: dict[torch.Tensor, dict[str, object]] = {}
    for part, part_groups in groups_by_optimizer(optimizer, groups):
        # A constructor with other arguments than the settings of a group cannot be asked.
        with contextlib.suppress(Exception):
            state |= type(part)([copy.copy(group) for group in part_groups], **part.defaults).state
    return state


def state_after_step(optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor) -> dict[str, Any]:
    """Give what it keeps for a parameter of this shape, type and device after one step with a gradient of zeros."""
    state, parameter = step_once(optimizer, group, like)
    return dict(state[parameter])


def step_once(
    optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor
) -> tuple[Mapping[torch.Tensor, dict[str, Any]], nn.Parameter]:
    """Give all that it keeps after one step, and the parameter that was stepped."""
    parameter = nn.Parameter(torch.zeros_like(like))
    stepped = over(optimizer, [active_group(group, [parameter])])
    parameter.grad = torch.zeros_like(parameter)
    step_without_trace(stepped)
    return stepped.state, parameter


def state_before_step(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Give what it keeps for this very parameter before its first step; of most optimizers nothing."""
    return dict(over(optimizer, [group | {"params": [parameter]}]).state.get(parameter, {}))


def zeroed(state: Mapping[str, object]) -> dict[str, object]:
    """Give the same with zeros in the place of all numbers."""
    return {key: _zero(value) for key, value in state.items()}


def is_plain_number(value: object) -> bool:
    """Whether it is a number or a truth value of Python, or derived from one, as numpy's float64 is."""
    return isinstance(value, bool | int | float)


def _zero(value: Any) -> object:
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    return type(value)(0) if is_plain_number(value) else value


def device_and_dtype(group: Group) -> tuple[torch.device, torch.dtype]:
    """Give the device and the type of a group's tensors."""
    # A stage may hold none of a group, and ZeRO-3 takes its tensors out of the groups between steps.
    first = group["params"][0] if group["params"] else torch.empty(0)
    return first.device, first.dtype


def active_group(group: Group, parameters: list[nn.Parameter]) -> Group:
    """The group's settings over other parameters, with a rate that is not zero, as it is while warming up."""
    rate = group.get("lr")
    changed = {"lr": torch.full_like(rate, _RATE) if torch.is_tensor(rate) else _RATE} if rate is not None else {}
    return group | changed | {"params": parameters}


@torch.no_grad()
def updates_of(
    optimizer: torch.optim.Optimizer,
    group: Group,
    starts: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Give what steps change, by tensor.

    Args:
        optimizer: its class and settings.
        group: settings of its groups.
        starts: tensors that are stepped together; they stay as they are.
        gradients: for each step one for each tensor.
    """
    parameters = [nn.Parameter(start.clone()) for start in starts]
    stepped = over(optimizer, [active_group(group, parameters)])
    device = starts[0].device
    with keeping_generators():
        # `torch.manual_seed` keeps a stack trace for each kind of device that has not started: a third of this probe.
        seed = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed(0)
        for step_gradients in gradients:
            for parameter, gradient in zip(parameters, step_gradients, strict=True):
                parameter.grad = gradient.clone()
            step_without_trace(stepped)
    return [parameter.detach() - start for parameter, start in zip(parameters, starts, strict=True)]


def step_without_trace(optimizer: torch.optim.Optimizer) -> None:
    """Step it without a trace in the generators: some optimizers add noise, or round by chance."""
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()
    with keeping_generators():
        # Not of the instance, where others put theirs.
        type(optimizer).step(optimizer)
