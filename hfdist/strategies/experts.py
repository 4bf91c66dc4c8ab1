"""Expert parallelism: the ranks of a group share the experts of each block, and send each other tokens by all-to-all.

Each rank of a group reads a batch of its own. transformers has the plans and the dispatch, which drops no token: a rank
sends each token to all of its experts, as many as there are, and a rank that gets none still takes part. LoRA of an
expert is where the expert is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from hfdist.errors import ConfigError
from hfdist.models.probing import kind_of_name
from hfdist.strategies.parameter_shards import (
    EXPERT,
    ParameterShard,
    check_is_of_transformers,
    indivisible_error,
    keep_local,
    no_plan_error,
    rules_on_this_stage,
    shard_of_dtensor,
)

_KEY = "strategy.expert"
_SHARDED = "grouped_gemm"
"""The style of a parameter that has all experts of a block along its first dimension."""
_DISPATCH = "ep_dispatch_experts"
"""The style of a module of experts."""
_BASE = "base_layer"
"""What PEFT calls the layer within one of its own."""
_HINT = "strategy.expert=1; strategy=fsdp2 shards any model"


def make_expert_plan(model: PreTrainedModel, num_ranks: int) -> dict[str, str]:
    """Find what transformers' plan of this type does to which module or parameter. Needs no process group.

    Raises:
        ConfigError: there is no plan for this model, or one of another kind; it has no experts, or their number is not
            a multiple of the ranks.
    """
    check_is_of_transformers(model, EXPERT)
    kind = model.config.model_type
    rules = _find_rules(model)
    sizes = count_experts(model, rules)
    if not sizes:
        raise ConfigError("this model has no experts to spread over ranks", where=_KEY, found=kind, hint=_HINT)
    if unknown := sorted({*rules.values()} - {_SHARDED, _DISPATCH}):
        what = "transformers' plan for the experts of this type has styles that are not known here"
        raise ConfigError(what, where=_KEY, found=f"{kind}: {', '.join(unknown)}", hint=_HINT)
    for name, num_experts in sizes.items():
        if num_experts % num_ranks != 0:
            what = "the number of experts is not a multiple of the number of ranks that share them"
            found = f"{num_experts} experts in {name.rpartition('.')[0].partition(f'.{_BASE}')[0]}"
            raise indivisible_error(EXPERT, num_ranks, num_experts, what=what, found=found)
    return rules


def _find_rules(model: PreTrainedModel) -> dict[str, str]:
    """Give the style of each parameter and module of experts, the parameters first.

    A stack that LoRA stands beside is within PEFT's layers, which transformers' own search does not know.
    """
    plan = model.ep_plan
    if not plan:
        raise no_plan_error(model, EXPERT)
    stacks = {name: kind_of_name(name.replace(f".{_BASE}", "")) for name, _ in model.named_parameters()}
    modules = {name: kind_of_name(name) for name, _ in model.named_modules()}
    return {name: plan[kind] for name, kind in (stacks | modules).items() if kind in plan}


def list_dispatching(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """List the modules of experts that are on this stage; those with LoRA are PEFT's outermost layers."""
    named = [name for name, style in plan.items() if style == _DISPATCH]
    return [name for name in named if next(model.get_submodule(name).parameters(), None) is not None]


def count_experts(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Give the number of experts that each parameter has that ranks share, by name: stacks, and LoRA beside them."""
    counts = {name: model.get_parameter(name).shape[0] for name, style in plan.items() if style == _SHARDED}
    for name in list_dispatching(model, plan):
        for path, wrapper in _list_wrappers(model, name):
            counts |= {f"{path}.{own}": int(wrapper.num_experts) for own, _ in _list_factors(wrapper)}
    return counts


def _list_wrappers(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    """List PEFT's layers around a module of experts, with their names, the outermost first: one for each stack."""
    found: list[tuple[str, Any]] = []
    while hasattr(module := model.get_submodule(name), _BASE):
        found.append((name, module))
        name = f"{name}.{_BASE}"
    return found


def _list_factors(wrapper: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the matrices of LoRA beside one stack."""
    return ((name, p) for name, p in wrapper.named_parameters() if not name.startswith(f"{_BASE}."))


def spread_experts(
    model: PreTrainedModel, experts: DeviceMesh, tensor: DeviceMesh, plan: dict[str, str]
) -> dict[str, ParameterShard]:
    """Leave this rank's experts in the model, in place, and say by name what they are.

    Args:
        model: a model with all its experts.
        experts: mesh of one axis: the ranks that share the experts.
        tensor: mesh of one axis: the ranks that read the same batch, of which each dispatches a share of its tokens.
        plan: the model's expert plan; what it says of modules that another rank of a pipeline holds is left out.
    """
    plan = rules_on_this_stage(model, plan)
    shards: dict[str, ParameterShard] = {}
    for name in list_dispatching(model, plan):
        # Before the dispatch, which asks each module how many experts it has.
        for path, wrapper in _list_wrappers(model, name):
            shards |= {f"{path}.{own}": shard for own, shard in _spread_factors(wrapper, experts)}
    apply_expert_parallelism(model, experts, tensor, plan, ep_implementation="all_to_all")
    for name in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == _SHARDED):
        module = model.get_submodule(name)
        placed: dict[str, DTensor] = {
            own: p for own, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        shards |= {f"{name}.{own}": shard_of_dtensor(parameter) for own, parameter in placed.items()}
        keep_local(module, placed)
    # A private mark: transformers then knows that every rank must take part in each forward.
    cast(Any, model)._is_fsdp_managed_module = True
    return shards


def _spread_factors(wrapper: Any, experts: DeviceMesh) -> Iterator[tuple[str, ParameterShard]]:
    """Leave LoRA of this rank's experts in PEFT's layer beside a stack, in place, and say what it is."""
    num_experts, num_local = wrapper.num_experts, wrapper.num_experts // experts.size()
    first = experts.get_local_rank() * num_local
    for name, parameter in list(_list_factors(wrapper)):
        shape = tuple(parameter.shape)
        # PEFT numbers the rows of A by expert, then by rank, and the columns of B by rank, then by expert.
        if name.startswith("lora_A."):
            rank = shape[0] // num_experts
            shard = ParameterShard(shape=shape, dim=0, parts=((first * rank, (first + num_local) * rank),))
        else:
            starts = range(first, shape[1], num_experts)
            shard = ParameterShard(shape=shape, dim=1, parts=tuple((start, start + num_local) for start in starts))
        parameter.data = shard.take(parameter.data)
        yield name, shard
    wrapper.num_experts = num_local
    # PEFT takes one expert for a linear layer, whose weight is the other way round than some stacks.
    wrapper.fan_in_fan_out = num_local == 1 and getattr(wrapper.get_base_layer(), "is_transposed", False)
