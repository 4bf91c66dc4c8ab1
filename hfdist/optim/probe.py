"""What the updates of an optimizer depend on, found by steps of small tensors.

A layout may give an optimizer parts of parameters (FSDP2, ZeRO), some of the parameters (a pipeline), or all. Whether
it updates them as one process would is a property of its arithmetic, which no list of names could tell of a user's own.
So the same tensors are stepped in three ways, and their updates compared:

    together    [a] [b]            differs from alone:   the update of a parameter depends on other parameters
    alone       [a], then [b]
    in parts    [a1], then [a2]    differs from alone:   the update of an element depends on its whole parameter
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hfdist.errors import first_line
from hfdist.optim.joined import Group
from hfdist.optim.trial_step import (
    Trial,
    active_group,
    copy_over,
    device_and_dtype,
    is_plain_number,
    state_after_step,
    step_once,
    step_without_trace,
    update_of,
    updates_of,
    zeroed,
)

_SHAPE = (96, 64)
"""Shape of the tensors that are stepped: large enough for optimizers that quantize only large tensors, in blocks."""
_CUT = 2500
"""Elements of the first part of such a tensor: the cut is within a row and within a block."""
_NUM_STEPS = 3
"""Number of steps in each of the three ways."""
_TOLERANCE = 1e-4
"""Relative to the largest update: far above rounding, far below what another rule does."""


class Reach(IntEnum):
    """How much of the model the update of an element depends on."""

    element = 0
    """The gradients of the element alone, and state that is made of them."""
    parameter = 1
    """All elements of its parameter, as with a norm or an orthogonalized matrix."""
    model = 2
    """Other parameters, too, as with a norm over all gradients."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the trial steps have shown of an optimizer."""

    reach: Reach
    why: str = ""
    """Why the reach is more than `element`; empty: it is not."""
    not_saved: str = ""
    """Why a checkpoint cannot hold the optimizer's state; empty: it can."""


def probe_optimizer(optimizer: torch.optim.Optimizer) -> Answer:
    """Find out what the updates of an optimizer depend on; of its groups, the one with the widest reach counts.

    The optimizer, its state and the random numbers of the process stay as they are.
    """
    answers = [_ask_group(optimizer, group) for group in _one_of_each_kind(optimizer.param_groups).values()]
    widest = max(answers, key=lambda answer: answer.reach, default=Answer(reach=Reach.element))
    not_saved = next((answer.not_saved for answer in answers if answer.not_saved), "")
    return Answer(reach=widest.reach, why=widest.why, not_saved=not_saved)


def groups_of_wholes(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> list[Group]:
    """List the groups in which an update depends on the whole parameter, out of `groups` of this optimizer."""
    groups = list(groups)
    needs_whole = {
        kind: _ask_group(optimizer, group).reach is Reach.parameter for kind, group in _one_of_each_kind(groups).items()
    }
    return [group for group in groups if needs_whole[_kind_of(group)]]


def _one_of_each_kind(groups: Iterable[Group]) -> dict[str, Group]:
    """Give a group by kind: the groups of a kind step alike, and a trial takes time."""
    kinds: dict[str, Group] = {}
    for group in groups:
        kinds.setdefault(_kind_of(group), group)
    return kinds


def _kind_of(group: Group) -> str:
    """Give the settings of a group as text, without those that do not change what an update depends on."""
    settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    # How large a decay is does not matter. LAMB and LARS look at norms only where there is some.
    settings["weight_decay"] = bool(group.get("weight_decay"))
    return repr(sorted(settings.items(), key=lambda item: item[0]))


@contextlib.contextmanager
def _with_values() -> Iterator[None]:
    """Make new tensors real ones on the CPU, though a plan may have set fake tensors and another device."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@_with_values()
def _ask_group(optimizer: torch.optim.Optimizer, group: Group) -> Answer:
    """Find out what the updates in a group depend on."""
    first, second = _draw(group)
    try:
        first_alone = update_of(optimizer, group, first)
        second_alone = update_of(optimizer, group, second)
        first_together, second_together = updates_of(optimizer, group, [first, second])
        not_saved = _why_not_saved(optimizer, group, first.start)
    except Exception as error:  # the class may be the user's, and raise anything
        why = f"it could not be tried on other tensors: {first_line(error)}"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    if not first_alone.any():
        why = "its step leaves the tensors of its groups as they are"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    if not (_is_close(first_together, first_alone) and _is_close(second_together, second_alone)):
        why = "the update of one parameter depends on the others"
        return Answer(reach=Reach.model, why=why, not_saved=not_saved)
    why = _why_not_by_element(optimizer, group, first, first_alone)
    return Answer(reach=Reach.parameter if why else Reach.element, why=why, not_saved=not_saved)


def _draw(group: Group) -> tuple[Trial, Trial]:
    """Draw two tensors, and their gradients in each step."""
    device, dtype = device_and_dtype(group)
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        return (torch.randn(_SHAPE, generator=generator) * scale).to(device, dtype)

    first, second = Trial(draw(1), []), Trial(draw(1), [])
    # Gradients of several sizes, also within a tensor, so that a norm or a bound on it shows.
    for step in range(_NUM_STEPS):
        first.gradients.append(draw(10.0**step))
        first.gradients[-1][: _SHAPE[0] // 2] *= 10
        second.gradients.append(draw(1))
    return first, second


def _why_not_saved(optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor) -> str:
    """Say which part of an optimizer's state no checkpoint can hold; empty: it can hold all."""
    state, parameter = step_once(optimizer, group, like)
    odd = [
        key
        for key, value in state[parameter].items()
        if value is not None and not torch.is_tensor(value) and not is_plain_number(value)
    ]
    # The state of a parameter stands under the parameter itself.
    ownerless = [str(key) for key, value in state.items() if not torch.is_tensor(key) and value]
    problems = []
    if odd:
        problems.append(f"it keeps what is neither a number nor a tensor: {', '.join(odd)}")
    if ownerless:
        problems.append(f"it keeps what belongs to no parameter: {', '.join(ownerless)}")
    return "; ".join(problems)


def _why_not_by_element(
    optimizer: torch.optim.Optimizer, group: Group, whole: Trial, whole_update: torch.Tensor
) -> str:
    """Say why an element's update depends on more than its own gradients; empty: it does not."""
    try:
        first_update = update_of(optimizer, group, whole.part(0, _CUT))
        second_update = update_of(optimizer, group, whole.part(_CUT, whole.start.numel()))
        state = state_after_step(optimizer, group, whole.part(0, _CUT).start)
    except Exception as error:  # the class may be the user's, and raise anything
        return f"it does not take flat pieces of a parameter: {first_line(error)}"
    if not _is_close(torch.cat([first_update, second_update]), whole_update.flatten()):
        return "the update of an element depends on the rest of its parameter"
    shared = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() not in (1, _CUT)]
    if shared:
        return f"it keeps what does not belong to single elements: {', '.join(shared)}"
    return ""


def starts_from_zeros(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether a state of zeros has the effect of no state, so that a parameter without gradients may be given one."""
    device, dtype = device_and_dtype(group)
    generator = torch.Generator().manual_seed(0)
    # Matrices, as some optimizers take nothing else.
    start = torch.randn(8, 8, generator=generator).to(device, dtype)
    gradient = torch.randn(8, 8, generator=generator).to(device, dtype)

    def step_from(state: dict[str, object] | None) -> torch.Tensor:
        parameter = nn.Parameter(start.clone())
        stepped = copy_over(optimizer, [active_group(group, [parameter])])
        if state is not None:
            stepped.state[parameter] = state
        for _ in range(_NUM_STEPS):
            parameter.grad = gradient.clone()
            step_without_trace(stepped)
        return parameter.detach()

    zeros = zeroed(state_after_step(optimizer, group, start))
    return torch.equal(step_from(None), step_from(zeros))


def ignores_gradient_size(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients that are all 100 times as large make the same updates, as with Adam, and unlike with SGD."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(64, generator=generator) for _ in range(2))
    for group in _one_of_each_kind(optimizer.param_groups).values():
        device, dtype = device_and_dtype(group)
        gradients = [gradient.to(device, dtype) * (1 + step) for step in range(_NUM_STEPS)]
        small = Trial(start.to(device, dtype), gradients)
        large = Trial(small.start, [100 * one for one in gradients])
        if not _is_close(update_of(optimizer, group, small), update_of(optimizer, group, large)):
            return False
    return True


def moving_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name the numbers in an optimizer's groups that its steps change, other than the rate, which a schedule sets."""
    moving: set[str] = set()
    for group in _one_of_each_kind(optimizer.param_groups).values():
        device, dtype = device_and_dtype(group)
        parameter = nn.Parameter(torch.zeros(_SHAPE, device=device, dtype=dtype))
        stepped = copy_over(optimizer, [active_group(group, [parameter])])
        [options] = stepped.param_groups
        before = {name: value for name, value in options.items() if is_plain_number(value) and name != "lr"}
        # An optimizer that cannot be stepped here is refused by `probe_optimizer`, where that matters.
        with contextlib.suppress(Exception):
            for _ in range(_NUM_STEPS):
                parameter.grad = torch.ones_like(parameter)
                step_without_trace(stepped)
        moving |= {name for name, value in before.items() if options[name] != value}
    return sorted(moving)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two updates differ by no more than rounding."""
    largest = float(other.abs().max())
    return math.isfinite(largest) and bool(((one - other).abs() <= _TOLERANCE * largest).all())
