"""Shares the parameters of a model out: matrices over tensor ranks, experts over expert ranks, or both.

Parameters that tensor ranks have whole get one gradient from all of them, so that they stay the same bits. Plans come
with transformers for over a hundred types, and some silently compute something else than the whole model: so a small
model of the class is tried first, beside itself whole, with one plan after another until one is right.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.collectives import broadcast, first_problem
from hfdist.errors import ConfigError
from hfdist.models.probing import small_with_adapters
from hfdist.strategies.experts import list_dispatching, make_expert_plan, spread_experts
from hfdist.strategies.parameter_shards import EXPERT, TENSOR
from hfdist.strategies.parts import Groups, ModelParts
from hfdist.strategies.self_check import BatchSharding, LayoutHooks, find_problem
from hfdist.strategies.tensor.plan import TensorPlan, apply_plan, list_plans, make_plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What is shared out over which axis of the mesh; None: nothing."""

    tensor: TensorPlan | None = None
    expert: dict[str, str] | None = None

    @property
    def axes(self) -> list[str]:
        """Axes whose ranks share parameters."""
        return [axis for axis, plan in ((TENSOR, self.tensor), (EXPERT, self.expert)) if plan is not None]

    @property
    def overrides_for_less(self) -> list[str]:
        """Overrides that ask for less."""
        if self.tensor is not None and self.tensor.regions is not None:
            return ["strategy.sequence=false"]
        return [f"strategy.{axis}=1" for axis in self.axes]

    @property
    def keys(self) -> str:
        """Config keys that ask for it."""
        return ", ".join(f"strategy.{axis}" for axis in self.axes)

    def describe(self) -> str:
        """Say how parameters are shared, for people."""
        shared = [] if self.tensor is None else [str(self.tensor.kind)]
        return "; ".join([*shared, "experts by transformers' plan for the type"] if self.expert is not None else shared)


def make_plans(model: PreTrainedModel, *, tensor: int, expert: int, splits_tokens: bool = False) -> list[Plans]:
    """Give the plans for so many ranks whose sizes fit, the best first. Needs no process group.

    Raises:
        ConfigError: there is no plan for this model, or a size that the number of ranks does not divide.
    """
    expert_plan = make_expert_plan(model, expert) if expert > 1 else None
    if tensor == 1:
        return [Plans(expert=expert_plan)]
    return [_join(plan, expert_plan) for plan in list_plans(model, tensor, splits_tokens=splits_tokens)]


def _join(tensor_plan: TensorPlan, expert_plan: dict[str, str] | None) -> Plans:
    """Leave experts to the expert ranks."""
    if expert_plan is None:
        return Plans(tensor=tensor_plan)
    experts = tuple(f"{name}." for name in expert_plan)

    def leave_out_experts(styles: dict[str, str]) -> dict[str, str]:
        return {name: style for name, style in styles.items() if not f"{name}.".startswith(experts)}

    rules, layers = leave_out_experts(tensor_plan.rules), leave_out_experts(tensor_plan.layers)
    return Plans(tensor=replace(tensor_plan, rules=rules, layers=layers), expert=expert_plan)


def shard_parameters(model: PreTrainedModel, mesh: DeviceMesh, candidates: list[Plans]) -> ModelParts:
    """Try plans on a small model of the class, and shard the model in place by the first that is right.

    A collective over all ranks.

    Raises:
        ConfigError: by none of them the model trains as it does on one process.
    """
    plans = _choose(model, _pairs(mesh), candidates)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    _start_from_first(model, mesh)
    groups = Groups(
        tensor=mesh.get_group(TENSOR) if plans.tensor is not None else None,
        expert=mesh.get_group(EXPERT) if plans.expert is not None else None,
        tokens=mesh.get_group("tokens"),
        tokens_of_experts=mesh.get_group("tokens_of_experts") if plans.expert is not None else None,
    )
    parts = _apply(model, mesh, plans, groups)
    share = sum(parameter.numel() for parameter in model.parameters()) / num_elements
    parts.description = f"{plans.describe()}; a rank has {share:.0%} of the parameters"
    logger.info("%s: %s", plans.keys, parts.description)
    return parts


def _choose(model: PreTrainedModel, pairs: DeviceMesh, candidates: list[Plans]) -> Plans:
    problems = []
    for plans in candidates:
        try:
            check_plans(model, pairs, plans)
        except ConfigError as error:
            logger.info("%s: not by %s: %s", plans.keys, plans.describe(), error.found)
            problems.append(error)
        else:
            return plans
    raise problems[0]


def _apply(model: PreTrainedModel, mesh: DeviceMesh, plans: Plans, groups: Groups) -> ModelParts:
    shards = {}
    if plans.expert is not None:
        shards[EXPERT] = spread_experts(model, mesh[EXPERT], mesh[TENSOR], plans.expert)
    if plans.tensor is not None:
        shards[TENSOR] = apply_plan(model, mesh[TENSOR], plans.tensor)
    partial = frozenset() if plans.tensor is None else plans.tensor.partial
    dispatching = [] if plans.expert is None else list_dispatching(model, plans.expert)
    return ModelParts(groups, shards, partial, dispatching)


@unset_fake_temporarily()
def _pairs(mesh: DeviceMesh) -> DeviceMesh:
    """The first two ranks of each tensor and expert group: what is small can be halved. A collective."""
    assert mesh.mesh_dim_names is not None
    ranks, names = mesh.mesh, list(mesh.mesh_dim_names)
    experts = ranks.movedim(names.index(EXPERT), -2) if EXPERT in names else ranks[..., None, :]
    ranks = experts.flatten(0, -3)[:, :2, :2]
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", EXPERT, TENSOR))


@torch.no_grad()
def _start_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Start from the weights of the first of the ranks that hold the model, as DDP does: they may have drawn their own.

    One tensor at a time is on a device.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.to(mesh.device_type).contiguous()
        for axis in (TENSOR, "tokens"):
            broadcast(sent, mesh.get_group(axis))
        tensor.data.copy_(sent)


def check_plans(model: PreTrainedModel, pairs: DeviceMesh, plans: Plans) -> None:
    """Refuse a type of model that does not train over these ranks as it does whole. A collective over all ranks.

    Args:
        model: a whole model.
        pairs: mesh of the ranks that try it, with axes `copies`, `expert` and `tensor`. The other ranks wait.
        plans: the plans of the model that are tried.

    Raises:
        ConfigError: naming the first wrong parameter; on all ranks alike.
    """
    problem = None
    if pairs.get_coordinate() is not None:
        data_ranks, data_rank = pairs[EXPERT].size(), pairs[EXPERT].get_local_rank()
        problem = find_problem(
            lambda: small_with_adapters(model),
            lambda small: _distribute(small, pairs, plans),
            BatchSharding(token_ranks=data_ranks, data_ranks=data_ranks, data_rank=data_rank),
            torch.device(pairs.device_type),
        )
    problem = first_problem(problem)
    if problem is not None:
        raise ConfigError(
            f"this type of model does not train over {' and '.join(plans.axes)} ranks as it does on one process",
            where=plans.keys,
            found=f"{model.config.model_type}, made small: {problem}",
            hint=f"{' '.join(plans.overrides_for_less)}; strategy=fsdp2 shards any model",
        )


def _distribute(small: PreTrainedModel, pairs: DeviceMesh, plans: Plans) -> LayoutHooks:
    """Shard a small model by plans of the same kind."""
    expert_plan = None if plans.expert is None else make_expert_plan(small, pairs[EXPERT].size())
    if plans.tensor is None:
        plans = Plans(expert=expert_plan)
    else:
        plans = _join(make_plan(small, pairs[TENSOR].size(), plans.tensor.kind), expert_plan)
    tokens = pairs.get_group(EXPERT)
    groups = Groups(
        tensor=pairs.get_group(TENSOR) if plans.tensor is not None else None,
        expert=tokens if plans.expert is not None else None,
        tokens=tokens,
    )
    parts = _apply(small, pairs, plans, groups)

    def reduce(loss: torch.Tensor) -> None:
        parts.average_gradients(small)
        parts.reduce_gradients(small)
        dist.all_reduce(loss, group=tokens)
        loss.div_(tokens.size())

    return LayoutHooks(reduce=reduce, own_pieces=parts.own_pieces)
