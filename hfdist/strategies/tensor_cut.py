"""Cut a model over the ranks of a tensor group, by the plan that transformers has for its type.

A cut parameter stays a plain tensor, this rank's part. It is a DTensor, which transformers' plans compute with, only
while its module runs: so FSDP2, optimizers, clipping and checkpoints need not know of the cut.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from hfdist.errors import ConfigError
from hfdist.strategies.pieces_tensor import Cut

_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a parameter that each rank has whole, and uses for its own heads only."""

_HEADS = r"\w*_heads|n_head"
"""The fields of a config that count heads, of all kinds of attention."""

_KEY = "strategy.tensor"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of which parameter; the others are whole on each rank."""

    rules: dict[str, str]
    """Names of modules and parameters, and the style of transformers for each."""
    partial: frozenset[str]
    """Parameters that are whole on each rank, and whose gradient is the sum of those of the ranks."""


def make_plan(model: PreTrainedModel, num_ranks: int) -> Plan:
    """Find the plan of the model's type, and check that its sizes divide. Needs no process group.

    The head stays whole on each rank, as does what several modules share: the loss reads the weight of the head.

    Raises:
        ConfigError: there is no plan for this model, or a size that the number of ranks does not divide.
    """
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        what, found = "only a model of transformers can be cut over tensor ranks, without an adapter", type(model)
        raise ConfigError(what, where=_KEY, found=found.__name__, hint="strategy.tensor=1, with strategy=fsdp2")
    try:
        # Private: the public way is `from_pretrained`, which would load and cut by itself.
        rules, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=num_ranks))
    except (ValueError, TypeError) as error:
        what = "transformers has no plan by which this type of model could be cut over tensor ranks"
        hint = "strategy.tensor=1; strategy=fsdp2 shards any model"
        raise ConfigError(what, where=_KEY, found=model.config.model_type, hint=hint) from error
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    whole = _kept_whole(model)
    kept: dict[str, str] = {}
    partial: set[int] = set()
    for name, style in rules.items():
        if name not in parameters and name not in modules:
            # Another name of a tied parameter.
            continue
        own = [parameters[name]] if name in parameters else list(modules[name].parameters(recurse=False))
        is_uneven = style == "embedding_rowwise" and any(p.shape[0] % num_ranks != 0 for p in own)
        if style == _PARTIAL:
            partial |= set(map(id, own))
        elif not is_uneven and whole.isdisjoint(map(id, own)):
            kept[name] = style
    _check_sizes(model, kept, num_ranks)
    return Plan(rules=kept, partial=frozenset(name for name, p in parameters.items() if id(p) in partial))


def _kept_whole(model: PreTrainedModel) -> set[int]:
    num_names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings()
    of_head = set() if head is None else {id(parameter) for parameter in head.parameters()}
    return of_head | {parameter for parameter, count in num_names.items() if count > 1}


def _check_sizes(model: PreTrainedModel, rules: dict[str, str], num_ranks: int) -> None:
    sizes = dict(_sizes_to_divide(model, rules))
    if not sizes:
        what, hint = "the plan of this type of model cuts nothing", "strategy.tensor=1; strategy=fsdp2 shards any model"
        raise ConfigError(what, where=_KEY, found=model.config.model_type, hint=hint)
    common = math.gcd(*sizes.values())
    if common % num_ranks != 0:
        name, size = next((name, size) for name, size in sizes.items() if size % num_ranks != 0)
        fitting = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            "a size of the model is not a multiple of the number of tensor ranks",
            where=_KEY,
            found=f"{num_ranks}, and {name}: {size}",
            allowed=", ".join(fitting),
            hint=f"strategy.tensor={max((int(n) for n in fitting if int(n) <= num_ranks), default=1)}",
        )


def _sizes_to_divide(model: PreTrainedModel, rules: dict[str, str]) -> Iterator[tuple[str, int]]:
    # A gathered output may be cut within a head.
    if any(style == "colwise" and "att" in name for name, style in rules.items()):
        text = model.config.get_text_config(decoder=True)
        for field, heads in vars(text).items():
            if re.fullmatch(_HEADS, field):
                yield from ((field, n) for n in (heads if isinstance(heads, list) else [heads]) if isinstance(n, int))
    for name, parameter in model.named_parameters():
        style, shape = rules.get(name, ""), parameter.shape
        if style.startswith("packed"):
            packed = shape[-1] if style == "packed_rowwise" or len(shape) == 1 else shape[-2]
            yield name, packed // 2
        elif style.startswith("colwise"):
            yield name, shape[-2] if len(shape) > 1 else shape[-1]
        elif style.startswith("rowwise") and len(shape) > 1:
            yield name, shape[-1]


def cut_model(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> dict[str, Cut]:
    """Leave this rank's part of each parameter in the model, in place, and say by name what it is.

    Args:
        model: whole, with the same weights on all ranks of the mesh.
        mesh: of one axis, the tensor ranks.
        plan: of this model.
    """
    apply_tensor_parallelism(model, mesh, plan.rules)
    cuts = {name: _describe(p) for name, p in model.named_parameters() if isinstance(p, DTensor) and _is_cut(p)}
    for module in model.modules():
        placed: dict[str, DTensor] = {
            name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        if placed:
            _keep_local(module, placed)
    return cuts


def _is_cut(parameter: DTensor) -> bool:
    return not parameter.placements[0].is_replicate()


def _describe(parameter: DTensor) -> Cut:
    [placement], mesh = parameter.placements, parameter.device_mesh
    kind: Any = placement
    dim = kind.dim % parameter.dim()
    # Packed matrices are cut one by one; one that is not packed is one of one.
    num_packed = getattr(kind, "split_factor", 1)
    packed = parameter.shape[dim] // num_packed
    part = packed // mesh.size()
    first = mesh.get_local_rank() * part
    parts = tuple((begin + first, begin + first + part) for begin in range(0, packed * num_packed, packed))
    cut = Cut(shape=tuple(parameter.shape), dim=dim, parts=parts)
    assert cut.local_shape == tuple(parameter.to_local().shape), (cut, parameter.placements)
    return cut


def _keep_local(module: nn.Module, placed: dict[str, DTensor]) -> None:
    """Let a module hold plain tensors, and DTensors while it runs."""
    own = module._parameters
    for name, parameter in placed.items():
        # A copy: else all of the whole tensor's memory would stay.
        own[name] = nn.Parameter(parameter.to_local().detach().clone(), requires_grad=parameter.requires_grad)
    layouts = {name: (p.device_mesh, p.placements, p.shape, p.stride()) for name, p in placed.items()}
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        plain = {name: own[name] for name in layouts}
        for name, (mesh, placements, shape, stride) in layouts.items():
            local: Any = plain[name]
            # In the module's dict, which a tensor that is no parameter cannot enter otherwise.
            own[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)  # type: ignore[assignment]
        try:
            return run(*args, **kwargs)
        finally:
            own.update(plain)

    module.forward = forward
