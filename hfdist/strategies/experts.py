"""Expert parallelism: the ranks of a group share the experts of each block, and send each other tokens by all-to-all.

Each rank of a group reads a batch of its own. transformers has the plans and the dispatch, which drops no token: a rank
sends each token to all of its experts, as many as there are, and a rank that gets none still takes part.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

from hfdist.errors import ConfigError
from hfdist.strategies.tensor.plan import ParameterShard, describe, keep_local, rules_here

_KEY = "strategy.expert"
_SHARDED = "grouped_gemm"
"""The style of a parameter that has all experts of a block along its first dimension."""
_HINT = "strategy.expert=1; strategy=fsdp2 shards any model"


def make_expert_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Find what transformers' plan of this type does to which module or parameter. Needs no process group.

    Raises:
        ConfigError: there is no plan for this model, it has no experts, or their number is not a multiple of the ranks.
    """
    if not isinstance(model, PreTrainedModel):
        what = "only experts of a model of transformers can be spread over ranks"
        hint = f"{_HINT}; an adapter by model.add_adapter(config), not by get_peft_model"
        raise ConfigError(what, where=_KEY, found=type(model).__name__, hint=hint)
    kind = model.config.model_type
    try:
        # Private, as in tensor/plan.py.
        _, rules, _ = model._resolve_parallel_plans(DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks))
    except (ValueError, TypeError) as error:
        what = "transformers has no plan by which experts of this type of model could be spread over ranks"
        raise ConfigError(what, where=_KEY, found=kind, hint=_HINT) from error
    parameters = dict(model.named_parameters())
    sizes = {name: parameters[name].shape[0] for name, style in rules.items() if style == _SHARDED}
    if not sizes and hasattr(model, "peft_config"):
        what = "an adapter changes the experts themselves, so they cannot be spread over ranks"
        raise ConfigError(what, where=f"{_KEY}, adapter.targets", found=kind, hint="adapter.targets=[q_proj,v_proj]")
    if not sizes:
        raise ConfigError("this model has no experts to spread over ranks", where=_KEY, found=kind, hint=_HINT)
    for name, num_experts in sizes.items():
        if num_experts % num_ranks != 0:
            fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ConfigError(
                "the number of experts is not a multiple of the number of ranks that share them",
                where=_KEY,
                found=f"{num_ranks}, and {num_experts} experts in {name.rpartition('.')[0]}",
                allowed=", ".join(map(str, fitting)),
                hint=f"strategy.expert={max(n for n in fitting if n <= num_ranks)}",
            )
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
    plan = rules_here(model, plan)
    apply_expert_parallelism(model, experts, tensor, plan, ep_implementation="all_to_all")
    shards: dict[str, ParameterShard] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == _SHARDED):
        module = model.get_submodule(name)
        placed: dict[str, DTensor] = {
            own: p for own, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        shards |= {f"{name}.{own}": describe(parameter) for own, parameter in placed.items()}
        keep_local(module, placed)
    # By this transformers knows that every rank must take part in each forward.
    cast(Any, model)._is_fsdp_managed_module = True
    return shards
