"""Ask an optimizer: step it on a few small tensors, whole, cut in two, and together, and compare.

A layout may give an optimizer parts of parameters (FSDP2, ZeRO), some of the parameters (a pipeline), or all. Whether
it updates them as one process would is a property of its arithmetic, which no list of names could tell of a user's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hfdist.errors import ConfigError, first_line
from hfdist.kept_generators import keeping_generators
from hfdist.optim.joined import Group, Joined, groups_by_optimizer

_SHAPE = (96, 64)
"""The tensor that is stepped: large enough for optimizers that quantize large tensors alone, in blocks."""
_CUT = 2500
"""Within a row and within a block."""
_NUM_STEPS = 3
_TOLERANCE = 1e-4
"""Relative to the largest update: far above rounding, far below what another rule does."""
_RATE = 1e-2


class Reach(IntEnum):
    """The values that the update of an element may depend on."""

    element = 0
    """On its own gradients alone, and what is kept of them."""
    parameter = 1
    """On all of its parameter, as a norm or an orthogonalized matrix does."""
    model = 2
    """On other parameters, too, as a norm over all gradients does."""


_LAYOUTS = {
    Reach.parameter: "any layout without a parameter server",
    Reach.model: "a layout that keeps the model whole: one process, or ddp",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of the probe."""

    reach: Reach
    why: str = ""
    """Why it is not less."""
    not_saved: str = ""
    """Why a checkpoint cannot hold what it keeps, if so."""


def check(optimizer: torch.optim.Optimizer, sees: Reach, *, is_saved: bool) -> None:
    """Refuse an optimizer that would not train as on one process, or whose state no checkpoint could hold.

    The optimizer is asked before its first step; `sees` is what the layout gives it whole.

    Raises:
        ConfigError: with the reason.
    """
    answer, where = ask(optimizer), "optimizer.name, optim or optimizers"
    if answer.reach > sees:
        raise ConfigError(
            "this optimizer does not train in this layout as it does on one process",
            where=where,
            found=f"{describe(optimizer)}: {answer.why}",
            allowed=_LAYOUTS[answer.reach],
            hint="strategy=ddp (sharding='none'), or an optimizer that works element by element, such as adamw",
        )
    if is_saved and answer.not_saved:
        what, allowed = "no checkpoint can hold what this optimizer keeps", "numbers and tensors for each parameter"
        hint, found = "save_strategy='no' (checkpoint=none), or another optimizer", f"{describe(optimizer)}: "
        raise ConfigError(what, where=where, found=found + answer.not_saved, allowed=allowed, hint=hint)


def check_steps_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that leaves trained parameters out, where gradients of these are not in the norm (ZeRO).

    Raises:
        ConfigError: it does.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if left_out:
        raise ConfigError(
            "gradients are clipped by the norm over all trained parameters, and DeepSpeed knows only those that the "
            "optimizer steps",
            where="optimizers, or create_optimizer",
            found=f"{describe(optimizer)} without {len(left_out)} of them, such as {left_out[0]}",
            hint="parameter.requires_grad_(False) for those that it leaves out, or a strategy without sharding",
        )


def describe(optimizer: object) -> str:
    """Name the class, or the classes, that really step."""
    while not isinstance(optimizer, Joined) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return repr(optimizer) if isinstance(optimizer, Joined) else type(optimizer).__name__


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
    for part, own in groups_by_optimizer(optimizer, groups):
        # A constructor with other arguments than the settings of a group cannot be asked.
        with contextlib.suppress(Exception):
            state |= type(part)([copy.copy(group) for group in own], **part.defaults).state
    return state


def ask(optimizer: torch.optim.Optimizer) -> Answer:
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
    """The settings of a group as text: rates and decays alone do not make another kind."""
    named = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr", "weight_decay")}
    return repr(sorted(named.items(), key=lambda item: item[0]))


@contextlib.contextmanager
def _with_values() -> Iterator[None]:
    """New tensors have values, whatever modes and devices a plan has set."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@_with_values()
def _ask_group(optimizer: torch.optim.Optimizer, group: Group) -> Answer:
    device, dtype = _place(group)
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        return (torch.randn(_SHAPE, generator=generator) * scale).to(device, dtype)

    first, second = draw(1), draw(1)
    # Of several sizes, also within a tensor, so that a norm or a bound on it shows.
    gradients = [[draw(10.0**step), draw(1)] for step in range(_NUM_STEPS)]
    for gradient, _ in gradients:
        gradient[: _SHAPE[0] // 2] *= 10
    try:
        alone = _updates(optimizer, group, [first], [[g] for g, _ in gradients])[0]
        other = _updates(optimizer, group, [second], [[g] for _, g in gradients])[0]
        together = _updates(optimizer, group, [first, second], gradients)
    except Exception as error:  # it is the user's class: any
        why = f"it could not be tried on other tensors: {first_line(error)}"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    if not alone.any():
        why = "its step leaves the tensors of its groups as they are"
        return Answer(reach=Reach.model, why=why, not_saved=why)
    kept, parameter = _step_once(optimizer, group, first)
    odd = [k for k, v in kept[parameter].items() if not (v is None or torch.is_tensor(v) or is_plain_number(v))]
    of_none = [str(key) for key, value in kept.items() if not torch.is_tensor(key) and value]
    not_saved = "; ".join(
        f"it keeps what {is_what}: {', '.join(keys)}"
        for is_what, keys in (("is neither a number nor a tensor", odd), ("belongs to no parameter", of_none))
        if keys
    )
    if not (_is_close(together[0], alone) and _is_close(together[1], other)):
        why = "the update of one parameter depends on the others"
        return Answer(reach=Reach.model, why=why, not_saved=not_saved)
    try:
        parts = [slice(0, _CUT), slice(_CUT, None)]
        cut = [
            _updates(optimizer, group, [first.flatten()[part]], [[g.flatten()[part]] for g, _ in gradients])[0]
            for part in parts
        ]
        state = state_after_step(optimizer, group, torch.zeros(_CUT, device=device, dtype=dtype))
    except Exception as error:
        why = f"it does not take flat pieces of a parameter: {first_line(error)}"
        return Answer(reach=Reach.parameter, why=why, not_saved=not_saved)
    if not _is_close(torch.cat(cut), alone.flatten()):
        why = "the update of an element depends on the rest of its parameter"
        return Answer(reach=Reach.parameter, why=why, not_saved=not_saved)
    shared = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() not in (1, _CUT)]
    if shared:
        why = f"it keeps what does not belong to single elements: {', '.join(shared)}"
        return Answer(reach=Reach.parameter, why=why, not_saved=not_saved)
    return Answer(reach=Reach.element, not_saved=not_saved)


def state_after_step(optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor) -> dict[str, Any]:
    """Give what it keeps for a parameter of this shape, type and device after one step with a gradient of zeros."""
    state, parameter = _step_once(optimizer, group, like)
    return dict(state[parameter])


def _step_once(
    optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor
) -> tuple[Mapping[torch.Tensor, dict[str, Any]], nn.Parameter]:
    """Give all that it keeps after one step, and the parameter that was stepped."""
    parameter = nn.Parameter(torch.zeros_like(like))
    stepped = over(optimizer, [_active(group, [parameter])])
    parameter.grad = torch.zeros_like(parameter)
    _step(stepped)
    return stepped.state, parameter


def state_before_step(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Give what it keeps for this very parameter before its first step; of most optimizers nothing."""
    return dict(over(optimizer, [group | {"params": [parameter]}]).state.get(parameter, {}))


def starts_from_zeros(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether it takes a state of zeros for none: what never had a gradient may then be given one."""
    device, dtype = _place(group)
    generator = torch.Generator().manual_seed(0)
    # A matrix, which some take alone.
    start, gradient = ((torch.randn(8, 8, generator=generator)).to(device, dtype) for _ in range(2))
    results = []
    for zeros in (False, True):
        parameter = nn.Parameter(start.clone())
        stepped = over(optimizer, [_active(group, [parameter])])
        if zeros:
            stepped.state[parameter] = zeroed(state_after_step(optimizer, group, parameter))
        for _ in range(_NUM_STEPS):
            parameter.grad = gradient.clone()
            _step(stepped)
        results.append(parameter.detach())
    return torch.equal(*results)


def ignores_gradient_size(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients that are all 100 times as large make the same updates, as with Adam, and unlike with SGD."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(64, generator=generator) for _ in range(2))
    for group in _kinds_of_groups(optimizer):
        device, dtype = _place(group)
        steps = [gradient.to(device, dtype) * (1 + step) for step in range(_NUM_STEPS)]
        first, second = (
            _updates(optimizer, group, [start.to(device, dtype)], [[scale * one] for one in steps])[0]
            for scale in (1, 100)
        )
        if not _is_close(first, second):
            return False
    return True


def moving_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name the numbers of a group that its steps change, other than the rate, which a schedule sets."""
    moving: set[str] = set()
    for group in _kinds_of_groups(optimizer):
        device, dtype = _place(group)
        parameter = nn.Parameter(torch.zeros(_SHAPE, device=device, dtype=dtype))
        stepped = over(optimizer, [_active(group, [parameter])])
        [options] = stepped.param_groups
        before = {name: value for name, value in options.items() if is_plain_number(value) and name != "lr"}
        # Where it cannot be stepped, nobody can say; where that matters, `ask` has refused it.
        with contextlib.suppress(Exception):
            for _ in range(_NUM_STEPS):
                parameter.grad = torch.ones_like(parameter)
                _step(stepped)
        moving |= {name for name, value in before.items() if options[name] != value}
    return sorted(moving)


def zeroed(state: Mapping[str, object]) -> dict[str, object]:
    """The same with zeros in the place of all numbers."""
    return {key: _zero(value) for key, value in state.items()}


def is_plain_number(value: object) -> bool:
    """Whether it is a number or a truth value of Python, or derived from one, as numpy's float64 is."""
    return isinstance(value, bool | int | float)


def _zero(value: object) -> object:
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    return type(value)(0) if isinstance(value, bool | int | float) else value


def _place(group: Group) -> tuple[torch.device, torch.dtype]:
    # A stage may hold none of a group, and ZeRO-3 takes its tensors out of the groups between steps.
    first = group["params"][0] if group["params"] else torch.empty(0)
    return first.device, first.dtype


def _active(group: Group, parameters: list[nn.Parameter]) -> Group:
    """The group's settings over other parameters, with a rate that is not zero, as it is while warming up."""
    rate = group.get("lr")
    changed = {"lr": torch.full_like(rate, _RATE) if torch.is_tensor(rate) else _RATE} if rate is not None else {}
    return group | changed | {"params": parameters}


@torch.no_grad()
def _updates(
    optimizer: torch.optim.Optimizer,
    group: Group,
    starts: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    stepped = over(optimizer, [_active(group, parameters)])
    device = starts[0].device
    with keeping_generators():
        # `torch.manual_seed` keeps a stack trace for each kind of device that has not started: a third of this probe.
        seed = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed(0)
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            _step(stepped)
    return [parameter.detach() - start for parameter, start in zip(parameters, starts, strict=True)]


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Step it without a trace in the generators: some optimizers add noise, or round by chance."""
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()
    with keeping_generators():
        # Not of the instance, where others put theirs.
        type(optimizer).step(optimizer)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    largest = float(other.abs().max())
    return math.isfinite(largest) and bool(((one - other).abs() <= _TOLERANCE * largest).all())
