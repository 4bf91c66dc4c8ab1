"""Tensor parallelism: the ranks of a group share the matrices of each layer, and FSDP2 may shard what each has.

All ranks of a group read the same batch and compute its loss together. Parameters that each has whole get one gradient
from all of them, so that they stay the same bits. Plans come with transformers for over a hundred types, and some
silently compute something else than the whole model: so a small model of the class is tried first, beside itself whole,
with one plan after another until one is right.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import WEIGHT, Piece, is_number
from hfdist.collectives import gather_json
from hfdist.errors import ConfigError, first_line
from hfdist.models.probing import small_model
from hfdist.pipeline.gradients import local, sum_gradients
from hfdist.pipeline.stage_io import broadcast, device_of
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.same_batch import check_same_batch
from hfdist.strategies.tensor_plan import Kind, ParameterShard, Plan, apply_plan, make_plan

logger = logging.getLogger(__name__)

LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
"""Largest relative differences. Sums of other orders make up to 4e-5 in a gradient of recurrent types, which in float64
differ by 1e-15; plans that are wrong make 1e-2 and more."""

_LEAST = 1e-3
"""Of the largest norm of a gradient: to smaller ones differences are not compared."""

_NUM_MICROBATCHES = 2


def shard_matrices(model: PreTrainedModel, mesh: DeviceMesh, plans: list[Plan]) -> TensorParts:
    """Try plans on a small model of the class, and shard the model in place by the first that is right.

    A collective over all ranks.

    Raises:
        ConfigError: by none of them the model trains as it does on one process.
    """
    plan = _choose_plan(model, _pair(mesh), plans)
    whole = sum(parameter.numel() for parameter in model.parameters())
    _start_from_first(model, mesh)
    shards = apply_plan(model, mesh["tensor"], plan)
    share = sum(parameter.numel() for parameter in model.parameters()) / whole
    description = f"{plan.kind}; a rank has {share:.0%} of the parameters"
    logger.info("strategy.tensor: %s", description)
    return TensorParts(mesh.get_group("tensor"), mesh.get_group("tokens"), shards, plan.partial, description)


def _choose_plan(model: PreTrainedModel, pairs: DeviceMesh, plans: list[Plan]) -> Plan:
    problems = []
    for plan in plans:
        try:
            check_plan(model, pairs, plan.kind)
        except ConfigError as error:
            logger.info("strategy.tensor: not by %s: %s", plan.kind, error.found)
            problems.append(error)
        else:
            return plan
    raise problems[0]


def _pair(mesh: DeviceMesh) -> DeviceMesh:
    """The first two ranks of each tensor group: what is small can be halved. A collective."""
    ranks = mesh.mesh.reshape(-1, mesh["tensor"].size())[:, :2]
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("data", "tensor"))


@torch.no_grad()
def _start_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Start from the weights of the first of the ranks that hold the model, as DDP does: they may have drawn their own.

    One tensor at a time is on a device.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.to(mesh.device_type).contiguous()
        for axis in ("tensor", "tokens"):
            broadcast(sent, mesh.get_group(axis))
        tensor.data.copy_(sent)


class TensorParts(ModelParts):
    """Parts of matrices, and whole parameters that get one gradient from all ranks of the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens_group: dist.ProcessGroup,
        shards: dict[str, ParameterShard],
        partial: frozenset[str],
        description: str = "",
    ) -> None:
        self.group, self.tokens_group = group, tokens_group
        self.description = description
        self._shards = shards
        self._partial = partial
        self._names: Any = WeakIdKeyDictionary()
        self._draws_alike = False

    def begin(self, batch: dict[str, torch.Tensor]) -> None:
        """See the base class; the first time after a start or a load the ranks begin to draw alike."""
        check_same_batch(batch, self.group, "tensor group")
        if not self._draws_alike:
            # Each rank draws the dropout masks of what it has whole; a resume sets the generators of each rank.
            _draw_alike(self.group)
            self._draws_alike = True

    def reduce_gradients(self, model: nn.Module) -> None:
        """Average them over the group, where each rank has a part of the gradient only: add them up."""
        whole = {name: parameter for name, parameter in model.named_parameters() if name not in self._shards}
        for name, parameter in whole.items():
            if parameter.grad is not None and name not in self._partial:
                # All ranks have it, the same but for rounding that a device may do in any order.
                local(parameter.grad).div_(self.group.size())
        sum_gradients(whole.values(), self.group)

    def counts(self, name: str) -> bool:
        """Each rank counts its parts, and the first one what is whole."""
        return name in self._shards or self.is_first

    def whole_shape(self, model: nn.Module, parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See the base class."""
        if parameter not in self._names:
            # FSDP2 has one tensor for a shard, and another for what is gathered.
            self._names.update({own: name for name, own in model.named_parameters()})
        shard = self._shards.get(self._names.get(parameter, ""))
        return shape if shard is None else shard.shape

    def name_part(self, name: str) -> str:
        """See the base class."""
        return f"{name} of tensor rank {self.group.rank()}" if name.partition("[")[0] in self._shards else name

    def own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """See the base class."""
        if piece.name in self._shards and not is_number(piece.key):
            return self._shards[piece.name].pieces(piece)
        return [piece]

    def after_load(self) -> None:
        """Let the next step draw alike in each group."""
        self._draws_alike = False


def _draw_alike(group: dist.ProcessGroup) -> None:
    """Set torch's generators of all ranks of a group to where those of its first rank stand. A collective."""
    device = device_of(group)
    state = torch.get_rng_state().to(device)
    broadcast(state, group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state().to(device)
        broadcast(state, group)
        torch.cuda.set_rng_state(state.cpu())


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest relative differences from the whole model."""

    loss: float
    gradient: float
    worst_parameter: str
    first_wrong: str
    """The first parameter, in the order of the model, whose gradient differs by more than the bound."""


def check_plan(model: PreTrainedModel, pairs: DeviceMesh, kind: Kind) -> None:
    """Refuse a type of model that does not train over tensor ranks as it does whole. A collective over all ranks.

    Args:
        model: whole.
        pairs: of the ranks that try it; axes `data` and `tensor`. The others wait.
        kind: of the plan that is tried.

    Raises:
        ConfigError: naming the first wrong parameter; on all ranks alike.
    """
    problem = None
    if pairs.get_coordinate() is not None:
        try:
            found = compare_small(model, pairs, kind)
        except Exception as error:  # whatever a model raises that cannot be made small, or is not made for its plan
            problem = f"it cannot be tried: {first_line(error)}"
        else:
            if not (found.loss <= LOSS_BOUND and found.gradient <= GRADIENT_BOUND):
                where = found.first_wrong or "no parameter"
                differences = f"the loss differs by {found.loss:.0e}, gradients by up to {found.gradient:.0e}"
                problem = f"{differences}; the first that is wrong: {where}"
    problems = [problem for problem in gather_json(problem) if problem is not None]
    if problems:
        raise ConfigError(
            "this type of model does not train over tensor ranks as it does on one process",
            where="strategy.tensor",
            found=f"{model.config.model_type}, made small: {problems[0]}",
            hint="strategy.tensor=1; strategy=fsdp2 shards any model",
        )


def compare_small(model: PreTrainedModel, mesh: DeviceMesh, kind: Kind) -> Differences:
    """Make a small model of the class, and train it whole and sharded. All ranks of the mesh call it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = small_model(model)
        for name, adapter in getattr(model, "peft_config", {}).items():
            small.add_adapter(copy.deepcopy(adapter), name)
        nn.Module.to(small, mesh.device_type)
        with torch.no_grad():
            for parameter in small.parameters():
                # Else ones and zeros, as of norms and biases, would hide what is wrong.
                parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.device))
    sharded = copy.deepcopy(small)
    whole_loss = _train(small)
    plan = make_plan(sharded, mesh.size(1), kind)
    shards = apply_plan(sharded, mesh["tensor"], plan)
    parts = TensorParts(mesh.get_group("tensor"), mesh.get_group("data"), shards, plan.partial)
    loss = _train(sharded)
    parts.reduce_gradients(sharded)
    return _compare(parts, sharded, small, abs(loss - whole_loss) / abs(whole_loss))


def _train(model: PreTrainedModel) -> float:
    total = 0.0
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for seed in range(_NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(min(vocabulary, 100), (2, 16), generator=generator).to(model.device)
        labels = tokens.clone()
        labels[0, 4:7] = -100
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        total += float(loss.detach())
    return total


def _compare(parts: TensorParts, sharded: nn.Module, whole: nn.Module, loss: float) -> Differences:
    """Compare this rank's part of each gradient with that part of the whole one's."""
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    # What would be zero but for rounding, such as that of a key's bias, has no size to compare with.
    least = _LEAST * max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    found: list[tuple[float, str]] = []
    for name, parameter in sharded.named_parameters():
        reference, own = gradients[name], parameter.grad
        if reference is None or own is None:
            found.append((0.0 if reference is own else math.inf, name))
            continue
        pieces = parts.own_pieces(Piece(name=name, key=WEIGHT, shape=tuple(own.shape), start=0, view=own))
        squared: Any = sum((piece.view - piece.of_whole(reference)).norm() ** 2 for piece in pieces)
        found.append((float(squared.sqrt() / reference.norm().clamp_min(least)), name))
    worst, name = max(found, key=lambda item: (math.isnan(item[0]), item[0]))
    first = next((name for difference, name in found if not difference <= GRADIENT_BOUND), "")
    return Differences(loss=loss, gradient=worst, worst_parameter=name, first_wrong=first)
