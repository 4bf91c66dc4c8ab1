"""What the step of an optimizer depends on: it steps small tensors, whole, cut in two, and together.

A layout may give an optimizer parts of parameters (FSDP2, ZeRO), some of the parameters (a pipeline), or all. Whether
it updates them as one process would is a property of its arithmetic, which no list of names could tell of a user's own.
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
    active_group,
    device_and_dtype,
    is_plain_number,
    over,
    state_after_step,
    step_once,
    step_without_trace,
    updates_of,
    zeroed,
)

_SHAPE = (96, 64)
"""The tensor that is stepped: large enough for optimizers that quantize large tensors alone, in blocks."""
_CUT = 2500
"""Within a row and within a block."""
_NUM_STEPS = 3
"""Steps of a trial."""
_TOLERANCE = 1e-4
"""Relative to the largest update: far above rounding, far below what another rule does."""


class Reach(IntEnum):
    """The values that the update of an element may depend on."""

    element = 0
    """On its own gradients alone, and what is kept of them."""
    parameter = 1
    """On all of its parameter, as a norm or an orthogonalized matrix does."""
    model = 2
    """On other parameters, too, as a norm over all gradients does."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of the probe."""

    reach: Reach
    why: str = ""
    """Why it is not less."""
    not_saved: str = ""
    """Why a checkpoint cannot hold what it keeps, if so."""


def probe_optimizer(optimizer: torch.optim.Optimizer) -> Answer:
    """Find out what its updates depend on; the strictest of its groups counts."""
    answers = [_ask_group(optimizer, group) for group in _kinds_of_groups(optimizer)]
    widest = max(answers, key=lambda answer: answer.reach, default=Answer(reach=Reach.element))
    not_saved = next((answer.not_saved for answer in answers if answer.not_saved), "")
    return Answer(reach=widest.reach, why=widest.why, not_saved=not_saved)


def groups_of_wholes(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> list[Group]:
    """List those of its groups of which an update depends on all of its parameter; one of each kind is asked."""
    asked: dict[str, bool] = {}
    found = []
    for group in groups:
        if (kind := _kind_of(group)) not in asked:
            asked[kind] = _ask_group(optimizer, group).reach is Reach.parameter
        if asked[kind]:
            found.append(group)
    return found


def _kinds_of_groups(optimizer: torch.optim.Optimizer) -> list[Group]:
    """One of each kind."""
    kinds: dict[str, Group] = {}
    for group in optimizer.param_groups:
        kinds.setdefault(_kind_of(group), group)
    return list(kinds.values())


def _kind_of(group: Group) -> str:
    """The settings of a group as text: rates, and decays that are not zero, do not make another kind."""
    named = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
    # LAMB and LARS look at norms only where there is decay.
    named["weight_decay"] = bool(group.get("weight_decay"))
    return repr(sorted(named.items(), key=lambda item: item[0]))


@contextlib.contextmanager
def _with_values() -> Iterator[None]:
    """New tensors have values, whatever modes and devices a plan has set."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@_with_values()
def _ask_group(optimizer: torch.optim.Optimizer, group: Group) -> Answer:
    starts, gradients = _draw(group)
    try:
        alone = [
            updates_of(optimizer, group, [start], [[of_step[number]] for of_step in gradients])[0]
            for number, start in enumerate(starts)
        ]
        together = updates_of(optimizer, group, starts, gradients)
        not_saved = _why_not_saved(optimizer, group, starts[0])
    except Exception as error:  # it is the user's class: any
        why = f"it could not be tried on other tensors: {first_line(error)}"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    if not alone[0].any():
        why = "its step leaves the tensors of its groups as they are"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    if not all(map(_is_close, together, alone)):
        why = "the update of one parameter depends on the others"
        return Answer(reach=Reach.model, why=why, not_saved=not_saved)
    why = _why_not_by_element(optimizer, group, starts[0], [of_step[0] for of_step in gradients], alone[0])
    return Answer(reach=Reach.parameter if why else Reach.element, why=why, not_saved=not_saved)


def _draw(group: Group) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Draw two tensors, and for each step their gradients."""
    device, dtype = device_and_dtype(group)
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        return (torch.randn(_SHAPE, generator=generator) * scale).to(device, dtype)

    starts = [draw(1), draw(1)]
    # Gradients have several sizes, also within a tensor, so that a norm or a bound on it shows.
    gradients = [[draw(10.0**step), draw(1)] for step in range(_NUM_STEPS)]
    for gradient, _ in gradients:
        gradient[: _SHAPE[0] // 2] *= 10
    return starts, gradients


def _why_not_saved(optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor) -> str:
    """Say what it keeps that no checkpoint can hold; empty: nothing."""
    kept, parameter = step_once(optimizer, group, like)
    odd = [k for k, v in kept[parameter].items() if not (v is None or torch.is_tensor(v) or is_plain_number(v))]
    of_none = [str(key) for key, value in kept.items() if not torch.is_tensor(key) and value]
    return "; ".join(
        f"it keeps what {is_what}: {', '.join(keys)}"
        for is_what, keys in (("is neither a number nor a tensor", odd), ("belongs to no parameter", of_none))
        if keys
    )


def _why_not_by_element(
    optimizer: torch.optim.Optimizer,
    group: Group,
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    whole_update: torch.Tensor,
) -> str:
    """Say why an element's update depends on more than its own gradients; empty: it does not."""
    try:
        cut = [
            updates_of(optimizer, group, [start.flatten()[part]], [[one.flatten()[part]] for one in gradients])[0]
            for part in (slice(0, _CUT), slice(_CUT, None))
        ]
        state = state_after_step(optimizer, group, torch.zeros(_CUT, device=start.device, dtype=start.dtype))
    except Exception as error:  # it is the user's class: any
        return f"it does not take flat pieces of a parameter: {first_line(error)}"
    if not _is_close(torch.cat(cut), whole_update.flatten()):
        return "the update of an element depends on the rest of its parameter"
    shared = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() not in (1, _CUT)]
    return f"it keeps what does not belong to single elements: {', '.join(shared)}" if shared else ""


def starts_from_zeros(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether it takes a state of zeros for none: what never had a gradient may then be given one."""
    device, dtype = device_and_dtype(group)
    generator = torch.Generator().manual_seed(0)
    # A matrix, which some take alone.
    start, gradient = ((torch.randn(8, 8, generator=generator)).to(device, dtype) for _ in range(2))
    results = []
    for zeros in (False, True):
        parameter = nn.Parameter(start.clone())
        stepped = over(optimizer, [active_group(group, [parameter])])
        if zeros:
            stepped.state[parameter] = zeroed(state_after_step(optimizer, group, parameter))
        for _ in range(_NUM_STEPS):
            parameter.grad = gradient.clone()
            step_without_trace(stepped)
        results.append(parameter.detach())
    return torch.equal(*results)


def ignores_gradient_size(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients that are all 100 times as large make the same updates, as with Adam, and unlike with SGD."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(64, generator=generator) for _ in range(2))
    for group in _kinds_of_groups(optimizer):
        device, dtype = device_and_dtype(group)
        steps = [gradient.to(device, dtype) * (1 + step) for step in range(_NUM_STEPS)]
        first, second = (
            updates_of(optimizer, group, [start.to(device, dtype)], [[scale * one] for one in steps])[0]
            for scale in (1, 100)
        )
        if not _is_close(first, second):
            return False
    return True


def moving_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name the numbers of a group that its steps change, other than the rate, which a schedule sets."""
    moving: set[str] = set()
    for group in _kinds_of_groups(optimizer):
        device, dtype = device_and_dtype(group)
        parameter = nn.Parameter(torch.zeros(_SHAPE, device=device, dtype=dtype))
        stepped = over(optimizer, [active_group(group, [parameter])])
        [options] = stepped.param_groups
        before = {name: value for name, value in options.items() if is_plain_number(value) and name != "lr"}
        # Where it cannot be stepped, nobody can say; where that matters, `probe_optimizer` has refused it.
        with contextlib.suppress(Exception):
            for _ in range(_NUM_STEPS):
                parameter.grad = torch.ones_like(parameter)
                step_without_trace(stepped)
        moving |= {name for name, value in before.items() if options[name] != value}
    return sorted(moving)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    largest = float(other.abs().max())
    return math.isfinite(largest) and bool(((one - other).abs() <= _TOLERANCE * largest).all())
