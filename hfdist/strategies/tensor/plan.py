"""Which part of each parameter a tensor rank holds: by transformers' plan for the type of the model, or by one for all.

    own                       transformers' plan: attention by heads, layers in pairs with one exchange for each pair
    own, attention gathered   the same, but the layers of attention divide their rows wherever heads do not divide
    gathered                  each linear layer of the blocks has some of its rows, and its output is gathered

The second and the third hold about as little, and send more. With each of them the vocabulary is divided if the model
allows it: rows of the embedding and of the head. A sharded parameter stays a plain tensor, this rank's part. Where
transformers' plan needs DTensors it is one while its module runs: so FSDP2, optimizers, clipping and checkpoints know
of no plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from hfdist.errors import ConfigError
from hfdist.models.architecture import count_heads
from hfdist.models.loss.shared_vocabulary import VocabularyShard, mark_shared
from hfdist.strategies.parameter_shards import (
    TENSOR,
    ParameterShard,
    check_is_of_transformers,
    indivisible_error,
    keep_local,
    no_plan_error,
    rules_on_this_stage,
    shard_of_dtensor,
)
from hfdist.strategies.tensor.layers import gather_blocks, is_lora, kept_whole, split_vocabulary
from hfdist.strategies.tensor.linear import (
    GATHERED,
    LOOKED_UP,
    SharedInputs,
    run_locally,
    shard_range,
    split_dimensions,
)
from hfdist.strategies.tensor.sequence import (
    SEQUENCE,
    SequenceParallel,
    find_tensor_regions,
    no_regions_error,
    partial_in_blocks,
)

_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a parameter that each rank has whole, and uses for its own heads only."""

_ALIASES = {"colwise_rep": GATHERED}
"""Styles of older plans, by the names of today."""

_KEY, _HINT = "strategy.tensor", "strategy.tensor=1; strategy=fsdp2 shards any model"


class PlanKind(NamedTuple):
    """How a plan is made."""

    blocks: str
    """`OWN`, `OWN_GATHERED` or `ALL_GATHERED`."""
    splits_vocabulary: bool
    splits_tokens: bool = False
    """Whether each rank has a part of the tokens between attention and MLP; with `OWN` only."""

    def __str__(self) -> str:
        tokens = ", and tokens are divided between attention and MLP" if self.splits_tokens else ""
        vocabulary = "divided" if self.splits_vocabulary else "whole on each rank"
        return f"{self.blocks}{tokens}; the vocabulary is {vocabulary}"


OWN = "transformers' plan for the type"
OWN_GATHERED = "transformers' plan for the type, but outputs of attention's layers are gathered"
ALL_GATHERED = "outputs of all layers are gathered"
PLAN_KINDS = tuple(PlanKind(blocks, splits) for blocks in (OWN, OWN_GATHERED, ALL_GATHERED) for splits in (True, False))
"""The first is the best; the last ones send more, or hold more."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What becomes of which parameter; the others are whole on each rank."""

    kind: PlanKind
    layers: dict[str, str]
    """Names of linear layers and embeddings, and the style of each (see linear.py)."""
    rules: dict[str, str]
    """Names of other modules and parameters, and the style of transformers for each."""
    partial: frozenset[str]
    """Parameters that are whole on each rank, and whose gradient is the sum of those of the ranks."""
    regions: list[str] | None = None
    """Names of the modules that need whole sequences, where a rank has a part of each between; None: it has all."""


def list_plans(model: PreTrainedModel, num_ranks: int, *, splits_tokens: bool = False) -> list[TensorPlan]:
    """Give the plans whose sizes fit, the best first. Needs no process group.

    Raises:
        ConfigError: there is none.
    """
    check_is_of_transformers(model, TENSOR)
    plans: list[TensorPlan] = []
    problems: list[ConfigError] = []
    for kind in _kinds(splits_tokens=splits_tokens):
        if kind.blocks == OWN_GATHERED and any(plan.kind.blocks == OWN for plan in plans):
            continue
        try:
            plans.append(make_plan(model, num_ranks, kind))
        except ConfigError as error:
            problems.append(error)
    if not plans:
        raise problems[0]
    return plans


def _kinds(*, splits_tokens: bool) -> tuple[PlanKind, ...]:
    if not splits_tokens:
        return PLAN_KINDS
    return tuple(kind._replace(splits_tokens=True) for kind in PLAN_KINDS if kind.blocks == OWN)


def first_plan(model: PreTrainedModel, num_ranks: int, *, splits_tokens: bool = False) -> TensorPlan:
    """Give the best plan whose sizes fit: the first of `list_plans`, in a fraction of its time.

    Raises:
        ConfigError: there is none.
    """
    check_is_of_transformers(model, TENSOR)
    *others, last = _kinds(splits_tokens=splits_tokens)
    for kind in others:
        with suppress(ConfigError):
            return make_plan(model, num_ranks, kind)
    return make_plan(model, num_ranks, last)


def make_plan(model: PreTrainedModel, num_ranks: int, kind: PlanKind) -> TensorPlan:
    """Make a plan of this kind. Needs no process group.

    Raises:
        ConfigError: the model has nothing of the kind, or a size that the number of ranks does not divide.
    """
    try:
        return _make_plan(model, num_ranks, kind)
    except ConfigError as error:
        if not kind.splits_tokens:
            raise
        # Without shared tokens there are more plans, for any type and size.
        raise ConfigError(error.what, where=SEQUENCE, found=error.found, hint=f"{SEQUENCE}=false") from error


def _make_plan(model: PreTrainedModel, num_ranks: int, kind: PlanKind) -> TensorPlan:
    of_vocabulary = split_vocabulary(model, num_ranks) if kind.splits_vocabulary else {}
    if kind.splits_vocabulary and not of_vocabulary:
        what = "the vocabulary of this model cannot be divided"
        raise ConfigError(what, where=_KEY, found=model.config.model_type, hint=_HINT)
    whole = kept_whole(model, of_vocabulary)
    rules: dict[str, str] = {}
    partial: frozenset[str] = frozenset()
    if kind.blocks == ALL_GATHERED:
        layers = gather_blocks(model, num_ranks, whole)
    else:
        layers, rules, partial = _resolve(model, num_ranks, whole, gathers_attention=kind.blocks == OWN_GATHERED)
        _check_sizes(model, layers, rules, num_ranks)
    if not layers and not rules:
        what = "no layer of this model can be divided"
        raise ConfigError(what, where=_KEY, found=model.config.model_type, hint=_HINT)
    regions = None
    if kind.splits_tokens:
        if rules:
            raise no_regions_error(*next(iter(rules.items())))
        regions = find_tensor_regions(model, layers)
        partial |= set(partial_in_blocks(model, layers))
    return TensorPlan(kind=kind, layers=layers | of_vocabulary, rules=rules, partial=partial, regions=regions)


def _resolve(
    model: PreTrainedModel, num_ranks: int, whole: set[int], *, gathers_attention: bool
) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
    """Give layers, rules and partial parameters by transformers' plan."""
    try:
        # A private method: the public way is `from_pretrained`, which would load and shard by itself.
        resolved, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=num_ranks))
    except (ValueError, TypeError) as error:
        raise no_plan_error(model, TENSOR) from error
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    gathered = gather_blocks(model, num_ranks, whole) if gathers_attention else {}
    layers = {name: style for name, style in gathered.items() if _is_attention(name)}
    rules: dict[str, str] = {}
    partial: set[int] = set()
    for name, style in resolved.items():
        if (name not in parameters and name not in modules) or (gathers_attention and _is_attention(name)):
            # Another name of a tied parameter, or divided in another way.
            continue
        ruled = [parameters[name]] if name in parameters else list(modules[name].parameters(recurse=False))
        is_uneven = style == LOOKED_UP and any(p.shape[0] % num_ranks != 0 for p in ruled)
        if style == _PARTIAL:
            partial |= set(map(id, ruled))
        elif is_uneven or not whole.isdisjoint(map(id, ruled)):
            continue
        elif name in modules:
            divided = _divide(modules, name, _ALIASES.get(style, style))
            layers |= divided
            rules |= {} if divided else {name: style}
        elif not split_dimensions(modules[name.rpartition(".")[0]], _ALIASES.get(style, style)):
            rules[name] = style
    return layers, rules, frozenset(name for name, p in parameters.items() if id(p) in partial)


def _is_attention(name: str) -> bool:
    # Names are such as `self_attn`, `attention` and `attn`.
    return "att" in name


def _divide(modules: dict[str, nn.Module], name: str, style: str) -> dict[str, str]:
    """Give what a rule of transformers for a module means for plain layers; empty: it is none.

    Of a LoRA layer the inner matrix stays whole, and the outer one is divided as the layer is.
    """
    module = modules[name]
    if not hasattr(module, "base_layer"):
        return {name: style} if split_dimensions(module, style) else {}
    inner, outer = f"{name}.base_layer", {"colwise": "lora_B", "rowwise": "lora_A", GATHERED: ""}.get(style)
    if outer is None or not is_lora(module) or not split_dimensions(modules[inner], style):
        what = "this adapter cannot be divided as transformers' plan divides the layer that it adapts"
        raise ConfigError(what, where=f"{_KEY}, adapter.type", found=f"{name}: {type(module).__name__}", allowed="lora")
    of_adapters = getattr(module, outer) if outer else ()
    return {inner: style} | {f"{name}.{outer}.{adapter}": style for adapter in of_adapters}


def _check_sizes(model: PreTrainedModel, layers: dict[str, str], rules: dict[str, str], num_ranks: int) -> None:
    sizes = dict(_sizes_to_divide(model, layers, rules))
    common = math.gcd(*sizes.values()) if sizes else num_ranks
    if common % num_ranks != 0:
        name, size = next((name, size) for name, size in sizes.items() if size % num_ranks != 0)
        what = "a size of the model is not a multiple of the number of tensor ranks"
        raise indivisible_error(TENSOR, num_ranks, common, what=what, found=f"{name}: {size}")


def _sizes_to_divide(
    model: PreTrainedModel, layers: dict[str, str], rules: dict[str, str]
) -> Iterator[tuple[str, int]]:
    # A gathered output may be divided within a head.
    if any(style == "colwise" and _is_attention(name) for name, style in (layers | rules).items()):
        yield from count_heads(model.config)
    for name, style in layers.items():
        if style in ("colwise", "rowwise"):
            size = "out_features" if style == "colwise" else "in_features"
            yield f"{name}.weight", getattr(model.get_submodule(name), size)
    for name, parameter in model.named_parameters():
        style, shape = rules.get(name, ""), parameter.shape
        if style.startswith("packed"):
            packed = shape[-1] if style == "packed_rowwise" or len(shape) == 1 else shape[-2]
            yield name, packed // 2
        elif style.startswith("colwise"):
            yield name, shape[-2] if len(shape) > 1 else shape[-1]
        elif style.startswith("rowwise") and len(shape) > 1:
            yield name, shape[-1]


def apply_plan(model: PreTrainedModel, mesh: DeviceMesh, plan: TensorPlan) -> dict[str, ParameterShard]:
    """Leave this rank's part of each parameter in the model, in place, and say by name what it is.

    Args:
        model: a whole model with the same weights on all ranks of the mesh.
        mesh: mesh of one axis: the tensor ranks.
        plan: the model's plan; what it says of parameters that another rank of a pipeline holds is left out.
    """
    apply_tensor_parallelism(model, mesh, rules_on_this_stage(model, plan.rules))
    shards = {
        name: shard_of_dtensor(p) for name, p in model.named_parameters() if isinstance(p, DTensor) and _is_sharded(p)
    }
    for module_name, module in model.named_modules():
        placed: dict[str, DTensor] = {
            name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        keep_local(module, placed)
        if placed:
            _place_while_running(module, placed)
        if placed or module_name in plan.rules:
            # A compiler cannot follow DTensors that come and go.
            module.forward = torch.compiler.disable(module.forward)
    group = mesh.get_group()
    sequence = None if plan.regions is None else SequenceParallel(model, group, plan.regions)
    return shards | _split_layers(model, group, plan.layers, sequence)


def _split_layers(
    model: PreTrainedModel,
    group: dist.ProcessGroup,
    layers: dict[str, str],
    sequence: SequenceParallel | None = None,
) -> dict[str, ParameterShard]:
    modules = dict(model.named_modules())
    # A tied parameter is one here, too, whatever modules have it.
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in modules.values():
        for name, parameter in module.named_parameters(recurse=False):
            owners[parameter].append((module, name))
    shards: dict[nn.Parameter, ParameterShard] = {}
    inputs = SharedInputs(group)
    # Another rank of a pipeline may have the others.
    here = {name: style for name, style in layers.items() if modules[name].weight is not None}
    for name, style in here.items():
        for of_module, dim in split_dimensions(modules[name], style).items():
            whole = getattr(modules[name], of_module)
            if whole in shards:
                continue
            start, stop = shard_range(whole.shape[dim], group.size(), group.rank())
            # A copy: else all of the whole tensor's memory would stay.
            local = whole.detach().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
            part = nn.Parameter(local, requires_grad=whole.requires_grad)
            shards[part] = ParameterShard(shape=tuple(whole.shape), dim=dim, parts=((start, stop),))
            for owner, of_owner in owners.pop(whole):
                owner._parameters[of_owner] = part
        region = sequence if sequence is not None and sequence.has(name) else None
        run_locally(modules[name], style, group, inputs, region)
    head = model.get_output_embeddings()
    if any(modules[name] is head for name in here):
        start, stop = shard_range(head.out_features, group.size(), group.rank())
        mark_shared(head, VocabularyShard(group=group, start=start, stop=stop, num_rows=head.out_features))
    return {name: shards[p] for name, p in model.named_parameters() if p in shards}


def _is_sharded(parameter: DTensor) -> bool:
    return not parameter.placements[0].is_replicate()


def _place_while_running(module: nn.Module, placed: dict[str, DTensor]) -> None:
    parameters = module._parameters
    layouts = {name: (p.device_mesh, p.placements, p.shape, p.stride()) for name, p in placed.items()}
    run = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        plain = {name: parameters[name] for name in layouts}
        for name, (mesh, placements, shape, stride) in layouts.items():
            local: Any = plain[name]
            # In the module's dict, which a tensor that is no parameter cannot enter otherwise.
            parameters[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)  # type: ignore[assignment]
        try:
            return run(*args, **kwargs)
        finally:
            parameters.update(plain)

    module.forward = forward
