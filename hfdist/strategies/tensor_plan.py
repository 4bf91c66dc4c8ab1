"""Which part of each parameter a tensor rank holds, by the plan that transformers has for the type of the model.

A sharded parameter stays a plain tensor, this rank's part. Only while its module runs it is a DTensor, with which
transformers' plans compute: so FSDP2, optimizers, clipping and checkpoints need not know of the plan.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from hfdist.checkpoint.piece import Piece
from hfdist.errors import ConfigError
from hfdist.models.build import is_elsewhere
from hfdist.strategies.tensor_linear import STYLES, run_locally

_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a parameter that each rank has whole, and uses for its own heads only."""

_HEADS = r"\w*_heads|n_head"
"""The fields of a config that count heads, of all kinds of attention."""

_KEY = "strategy.tensor"


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """What this rank holds of one parameter: along one dimension, one part or several."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    parts: tuple[tuple[int, int], ...]
    """First index and one past the last, along `dim`; the rank holds them one behind the other."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """Give pieces of the whole tensor, from a piece of rows of what the rank holds as if that were whole."""
        row, local_row = math.prod(self.shape[1:]), math.prod(self.local_shape[1:])
        first, num_rows = piece.start // local_row, len(piece.view)
        begins = accumulate((stop - start for start, stop in self.parts), initial=0)
        if piece.view.numel() == 0:
            yield replace(piece, shape=self.shape, start=0)
        elif self.dim == 0:
            for begin, (start, stop) in zip(begins, self.parts, strict=False):
                low, high = max(first, begin), min(first + num_rows, begin + stop - start)
                if low < high:
                    view = piece.view[low - first : high - first]
                    yield replace(piece, shape=self.shape, start=(start + low - begin) * row, view=view)
        else:
            inner = math.prod(self.shape[self.dim + 1 :])
            for begin, (start, stop) in zip(begins, self.parts, strict=False):
                yield replace(
                    piece,
                    shape=self.shape,
                    start=first * row + start * inner,
                    run=(stop - start) * inner,
                    pitch=self.shape[self.dim] * inner,
                    view=piece.view.narrow(self.dim, begin, stop - start),
                )


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
        what, found = "only a model of transformers can be sharded over tensor ranks, without an adapter", type(model)
        raise ConfigError(what, where=_KEY, found=found.__name__, hint="strategy.tensor=1, with strategy=fsdp2")
    try:
        # Private: the public way is `from_pretrained`, which would load and shard by itself.
        rules, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=num_ranks))
    except (ValueError, TypeError) as error:
        what = "transformers has no plan by which this type of model could be sharded over tensor ranks"
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
        what, hint = (
            "the plan of this type of model shards nothing",
            "strategy.tensor=1; strategy=fsdp2 shards any model",
        )
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
    # A gathered output may be divided within a head.
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


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> dict[str, ParameterShard]:
    """Leave this rank's part of each parameter in the model, in place, and say by name what it is.

    Args:
        model: whole, with the same weights on all ranks of the mesh.
        mesh: of one axis, the tensor ranks.
        plan: of this model; what it says of parameters that another rank of a pipeline holds is left out.
    """
    apply_tensor_parallelism(model, mesh, _rules_here(model, plan.rules))
    shards = {name: describe(p) for name, p in model.named_parameters() if isinstance(p, DTensor) and _is_sharded(p)}
    for module_name, module in model.named_modules():
        placed: dict[str, DTensor] = {
            name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        style = plan.rules.get(module_name, "")
        keep_local(module, placed)
        if type(module) is nn.Linear and style in STYLES:
            run_locally(module, style, mesh.get_group())
        elif placed:
            _place_while_running(module, placed)
    return shards


def _rules_here(model: nn.Module, rules: dict[str, str]) -> dict[str, str]:
    here = {name for name, module in model.named_modules() if not is_elsewhere(module)}
    here |= {name for name, _ in model.named_parameters()}
    return {name: style for name, style in rules.items() if name in here}


def _is_sharded(parameter: DTensor) -> bool:
    return not parameter.placements[0].is_replicate()


def describe(parameter: DTensor) -> ParameterShard:
    """Say which part this rank holds of a parameter that is sharded along one dimension."""
    [placement], mesh = parameter.placements, parameter.device_mesh
    kind: Any = placement
    dim = kind.dim % parameter.dim()
    # Packed matrices are sharded one by one; one that is not packed is one of one.
    num_packed = getattr(kind, "split_factor", 1)
    packed = parameter.shape[dim] // num_packed
    part = packed // mesh.size()
    first = mesh.get_local_rank() * part
    parts = tuple((begin + first, begin + first + part) for begin in range(0, packed * num_packed, packed))
    shard = ParameterShard(shape=tuple(parameter.shape), dim=dim, parts=parts)
    assert shard.local_shape == tuple(parameter.to_local().shape), (shard, parameter.placements)
    return shard


def keep_local(module: nn.Module, placed: dict[str, DTensor]) -> None:
    """Leave in a module what this rank holds of its own parameters, as plain tensors."""
    for name, parameter in placed.items():
        # A copy: else all of the whole tensor's memory would stay.
        local = parameter.to_local().detach().clone()
        module._parameters[name] = nn.Parameter(local, requires_grad=parameter.requires_grad)


def _place_while_running(module: nn.Module, placed: dict[str, DTensor]) -> None:
    own = module._parameters
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
