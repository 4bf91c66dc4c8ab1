"""Trial steps: an optimizer's rule on other tensors, while the optimizer and the random numbers stay as they are."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hfdist.kept_generators import keeping_generators
from hfdist.optim.joined import Group, groups_by_optimizer

_RATE = 1e-2
"""Learning rate of all trial steps."""


class Trial(NamedTuple):
    """A tensor that is stepped, and its gradient in each step."""

    start: torch.Tensor
    gradients: list[torch.Tensor]

    def part(self, begin: int, end: int) -> Trial:
        """Give the elements from `begin` to `end` of the flat tensors, as a trial of their own."""
        return Trial(self.start.flatten()[begin:end], [one.flatten()[begin:end] for one in self.gradients])


def copy_over(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> torch.optim.Optimizer:
    """Give an optimizer of the same class and settings over other groups of tensors, as before its first step."""
    # Not by the constructor: a user's class may take any arguments.
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = dict(vars(optimizer))
    # A schedule or a loss scaler puts a step of its own there, bound to the original.
    attributes.pop("step", None)
    for name, value in attributes.items():
        if name.endswith("_hooks"):
            # Hooks are the user's, and not for trial steps.
            attributes[name] = type(value)()
        elif isinstance(value, dict | list):
            attributes[name] = copy.copy(value)
    vars(other).update(attributes)
    other.param_groups = [copy.copy(group) for group in groups]
    other.state = defaultdict(dict, _state_of_construction(optimizer, other.param_groups))
    return other


def _state_of_construction(
    optimizer: torch.optim.Optimizer, groups: list[Group]
) -> dict[torch.Tensor, dict[str, object]]:
    """Give the state that the optimizer's constructor makes, as Adagrad's does; most make none before a step."""
    state: dict[torch.Tensor, dict[str, object]] = {}
    for part, part_groups in groups_by_optimizer(optimizer, groups):
        # A constructor with other arguments than the settings of a group cannot be asked.
        with contextlib.suppress(Exception):
            state |= type(part)([copy.copy(group) for group in part_groups], **part.defaults).state
    return state


def state_after_step(optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor) -> dict[str, Any]:
    """Give the state of a parameter of the shape, type and device of `like`, after a step with a gradient of zeros."""
    state, parameter = step_once(optimizer, group, like)
    return dict(state[parameter])


def step_once(
    optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor
) -> tuple[Mapping[torch.Tensor, dict[str, Any]], nn.Parameter]:
    """Step a parameter of zeros, made like another tensor, once with a gradient of zeros.

    Returns:
        The whole state of the optimizer, and the parameter.
    """
    parameter = nn.Parameter(torch.zeros_like(like))
    stepped = copy_over(optimizer, [active_group(group, [parameter])])
    parameter.grad = torch.zeros_like(parameter)
    step_without_trace(stepped)
    return stepped.state, parameter


def state_before_step(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Give the state of this very parameter before its first step; most optimizers have none."""
    unstepped = copy_over(optimizer, [group | {"params": [parameter]}])
    return dict(unstepped.state.get(parameter, {}))


def zeroed(state: Mapping[str, object]) -> dict[str, object]:
    """Copy the state of a parameter with zeros in the place of all numbers."""
    return {key: _zero(value) for key, value in state.items()}


def is_plain_number(value: object) -> bool:
    """Whether a value is a number or a truth value of Python, or derived from one, as numpy's float64 is."""
    return isinstance(value, bool | int | float)


def _zero(value: Any) -> object:
    """Give zeros of the kind of a value; a value that is no number stays."""
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    if is_plain_number(value):
        return type(value)(0)
    return value


def device_and_dtype(group: Group) -> tuple[torch.device, torch.dtype]:
    """Give the device and the type of a group's tensors; of a group without tensors, those of a new tensor."""
    # A stage may hold none of a group, and ZeRO-3 takes its tensors out of the groups between steps.
    first = group["params"][0] if group["params"] else torch.empty(0)
    return first.device, first.dtype


def active_group(group: Group, parameters: list[nn.Parameter]) -> Group:
    """Give a group with the settings of another over other parameters, and the learning rate of trial steps.

    The rate of the other group may be zero, as it is at the begin of a warm-up, and then no update would show.
    """
    settings = dict(group)
    rate = group.get("lr")
    if torch.is_tensor(rate):
        settings["lr"] = torch.full_like(rate, _RATE)
    elif rate is not None:
        settings["lr"] = _RATE
    return settings | {"params": parameters}


def update_of(optimizer: torch.optim.Optimizer, group: Group, trial: Trial) -> torch.Tensor:
    """Give how far the steps of a trial move its tensor, in the tensor's shape; it is stepped alone."""
    [update] = updates_of(optimizer, group, [trial])
    return update


@torch.no_grad()
def updates_of(optimizer: torch.optim.Optimizer, group: Group, trials: list[Trial]) -> list[torch.Tensor]:
    """Give how far steps move the tensor of each trial, in its shape.

    Args:
        optimizer: gives the class and the settings; it is not stepped itself.
        group: the group of it whose settings are used.
        trials: tensors that are stepped together, as one group; they stay as they are.
    """
    parameters = [nn.Parameter(trial.start.clone()) for trial in trials]
    stepped = copy_over(optimizer, [active_group(group, parameters)])
    with keeping_generators():
        # `torch.manual_seed` keeps a stack trace for each kind of device that has not started: a third of a probe.
        is_on_gpu = parameters[0].device.type == "cuda"
        seed = torch.manual_seed if is_on_gpu else torch.default_generator.manual_seed
        seed(0)
        for step_gradients in zip(*(trial.gradients for trial in trials), strict=True):
            for parameter, gradient in zip(parameters, step_gradients, strict=True):
                parameter.grad = gradient.clone()
            step_without_trace(stepped)
    return [parameter.detach() - trial.start for parameter, trial in zip(parameters, trials, strict=True)]


def step_without_trace(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer, and set the random generators back: some optimizers add noise, or round by chance."""
    # Schedule-free optimizers step only after a call of their `train`.
    switch_to_training = getattr(optimizer, "train", None)
    if callable(switch_to_training):
        switch_to_training()
    with keeping_generators():
        # The class's step: schedules and loss scalers put one of their own on the instance.
        type(optimizer).step(optimizer)
