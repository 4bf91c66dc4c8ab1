"""Which share of each part of a model a rank has by tensor and expert degree, from the plans that runs follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from torch import nn
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.models.embeddings import input_embeddings
from hfdist.pipeline.stage_module import Block
from hfdist.planning.searching.constants import ShareOfParts
from hfdist.planning.searching.layout_space import divisors
from hfdist.strategies.experts import count_experts, make_expert_plan
from hfdist.strategies.tensor.linear import split_dimensions
from hfdist.strategies.tensor.plan import TensorPlan, first_plan

_DIVIDING = ("colwise", "rowwise", "packed")
"""How styles of transformers begin that leave a share of a parameter on a rank."""
_PRIMES = (2, 3, 5, 7)
"""Degrees that are tried: a number of experts that none of them divides is not shared out."""


def find_shares(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    *,
    tensor_plans: Mapping[int, TensorPlan],
) -> dict[tuple[int, int], ShareOfParts]:
    """Give the shares by (tensor, expert) degree, of those that go with the model; (1, 1) is always there.

    Args:
        model: the whole model; its tensors may be fake.
        blocks: one of each kind.
        tensor_plans: the plans by degree, as `find_tensor_plans` gives them.
    """
    experts = _expert_parameters(model)
    degrees = divisors(math.gcd(*experts.values())) if experts else [1]
    shares = {}
    for tensor, plan in {1: None, **tensor_plans}.items():
        of_tensor = _divided(model, plan, tensor)
        for expert in degrees:
            of_experts = dict.fromkeys(experts, expert) if expert > 1 else {}
            shares[tensor, expert] = _shares(model, blocks, of_tensor | of_experts)
    return shares


def find_tensor_plans(
    model: PreTrainedModel, degrees: Iterable[int], *, splits_tokens: bool = False
) -> dict[int, TensorPlan]:
    """Give the plan that a run tries first, by degree, of those degrees that go with the model."""
    plans: dict[int, TensorPlan] = {}
    for degree in degrees:
        if degree > 1:
            with suppress(ConfigError):
                plans[degree] = first_plan(model, degree, splits_tokens=splits_tokens)
    return plans


def _expert_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Give the parameters that hold all experts of a block, by name, with their number; empty: none can be shared."""
    for degree in _PRIMES:
        with suppress(ConfigError):
            return count_experts(model, make_expert_plan(model, degree))
    return {}


def _divided(model: PreTrainedModel, plan: TensorPlan | None, degree: int) -> dict[str, int]:
    """Give the parameters that tensor ranks share out, by name, with the number of their shares."""
    if plan is None:
        return {}
    modules = dict(model.named_modules())
    names = {
        f"{layer}.{own}" for layer, style in plan.layers.items() for own in split_dimensions(modules[layer], style)
    }
    for name, style in plan.rules.items():
        if style.startswith(_DIVIDING):
            names |= {f"{name}.{own}" for own, _ in modules[name].named_parameters()} if name in modules else {name}
    return dict.fromkeys(names, degree)


def _shares(model: PreTrainedModel, blocks: Sequence[Block], divided: dict[str, int]) -> ShareOfParts:
    """Give the share of each part that a rank has, where these parameters have so many shares."""
    degrees = {
        id(parameter): divided[name]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in divided
    }

    def share(modules: Iterable[nn.Module | None]) -> float:
        parameters = {id(p): p for module in modules if module is not None for p in module.parameters()}
        total = sum(p.numel() for p in parameters.values())
        held = sum(p.numel() / degrees.get(key, 1) for key, p in parameters.items())
        return held / total if total else 1.0

    return ShareOfParts(
        prologue=share([input_embeddings(model)]),
        kinds=tuple(map(share, blocks)),
        epilogue=share([model.get_output_embeddings()]),
    )
