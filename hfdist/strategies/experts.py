"""Expert parallelism: the ranks of a group share the experts of each block, and send each other tokens by all-to-all.

Each rank of a group reads a batch of its own. transformers has the plans and the dispatch, which drops no token: a rank
sends each token to all of its experts, as many as there are, and a rank that gets none still takes part.
"""

from __future__ import annotations

from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from hfdist.errors import ConfigError
from hfdist.strategies.parameter_shards import (
    EXPERT,
    ParameterShard,
    check_is_of_transformers,
    indivisible_error,
    keep_local,
    rules_on_this_stage,
    shard_of_dtensor,
    transformers_plan,
)

_KEY = "strategy.expert"
_SHARDED = "grouped_gemm"
"""The style of a parameter that has all experts of a block along its first dimension."""
_HINT = "strategy.expert=1; strategy=fsdp2 shards any model"


def make_expert_plan(model: PreTrainedModel, num_ranks: int) -> dict[str, str]:
    """Find what transformers' plan of this type does to which module or parameter. Needs no process group.

    Raises:
        ConfigError: there is no plan for this model, it has no experts, or their number is not a multiple of the ranks.
    """
    check_is_of_transformers(model, EXPERT)
    kind = model.config.model_type
    rules = transformers_plan(model, EXPERT, num_ranks)
    parameters = dict(model.named_parameters())
    sizes = {name: parameters[name].shape[0] for name, style in rules.items() if style == _SHARDED}
    if not sizes and hasattr(model, "peft_config"):
        what = "an adapter changes the experts themselves, so they cannot be spread over ranks"
        raise ConfigError(what, where=f"{_KEY}, adapter.targets", found=kind, hint="adapter.targets=[q_proj,v_proj]")
    if not sizes:
        raise ConfigError("this model has no experts to spread over ranks", where=_KEY, found=kind, hint=_HINT)
    for name, num_experts in sizes.items():
        if num_experts % num_ranks != 0:
            what = "the number of experts is not a multiple of the number of ranks that share them"
            found = f"{num_experts} experts in {name.rpartition('.')[0]}"
            raise indivisible_error(EXPERT, num_ranks, num_experts, what=what, found=found)
    return rules


def spread_experts(
    model: PreTrainedModel, experts: DeviceMesh, tensor: DeviceMesh, plan: dict[str, str]
) -> dict[str, ParameterShard]:
    """Leave this rank's experts in the model, in place, and say by name what they are.

    Args:
        model: with whole experts.
        experts: of one axis, the ranks of this group.
        tensor: of one axis, the ranks that read this rank's batch, and each dispatch a share of its tokens.
        plan: of the model; what it says of modules that another rank of a pipeline holds is left out.
    """
    plan = rules_on_this_stage(model, plan)
    apply_expert_parallelism(model, experts, tensor, plan, ep_implementation="all_to_all")
    shards: dict[str, ParameterShard] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == _SHARDED):
        module = model.get_submodule(name)
        placed: dict[str, DTensor] = {
            own: p for own, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        shards |= {f"{name}.{own}": shard_of_dtensor(parameter) for own, parameter in placed.items()}
        keep_local(module, placed)
    # By this transformers knows that every rank must take part in each forward.
    cast(Any, model)._is_fsdp_managed_module = True
    return shards
