"""Tensor parallelism: the ranks of a group share the matrices of each layer, and FSDP2 may shard what each has.

All ranks of a group read the same batch and compute its loss together. Parameters that each has whole get one gradient
from all of them, so that they stay the same bits. Plans come with transformers for over a hundred types, and some
silently compute something else than the whole model: so a small model of the class is tried first, beside itself whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

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
from hfdist.optim.probe import Reach
from hfdist.pipeline.gradients import local, sum_gradients, sum_in_order
from hfdist.pipeline.stage_io import device_of
from hfdist.strategies.base import Batch, Engine, ShardFractions, Strategy, TrainerHooks
from hfdist.strategies.fsdp import FsdpEngine, broadcast, shard_model
from hfdist.strategies.same_batch import check_same_batch
from hfdist.strategies.tensor_plan import ParameterShard, apply_plan, make_plan

LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
"""Largest relative differences. Sums of other orders make up to 4e-5 in a gradient of recurrent types, which in float64
differ by 1e-15; plans that are wrong make 1e-2 and more."""

_NUM_MICROBATCHES = 2


class TensorStrategy(Strategy):
    """`strategy.tensor=N`, by transformers' plan for the type of the model; alone or under FSDP2."""

    def partition(self, model: nn.Module) -> None:
        """Check that the model can be sharded; it stays whole until `build`.

        Raises:
            ConfigError: it cannot.
        """
        make_plan(cast(PreTrainedModel, model), self.topology.tensor)

    @cached_property
    def _pairs(self) -> DeviceMesh:
        """The first two ranks of each tensor group: what is small can be halved. A collective the first time."""
        ranks = self.mesh.mesh.reshape(-1, self.topology.tensor)[:, :2]
        return DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=("data", "tensor"))

    def build(self, model: nn.Module) -> Engine:
        """Try the plan on a small model of the class, then shard the model in place. A collective.

        Raises:
            ConfigError: the model cannot be sharded, or does not train so as it does on one process.
        """
        plan, mesh = make_plan(cast(PreTrainedModel, model), self.topology.tensor), self.mesh
        check_plan(cast(PreTrainedModel, model), self._pairs)
        whole = sum(parameter.numel() for parameter in model.parameters())
        _start_from_rank_0(model, mesh.device_type)
        shards = apply_plan(model, mesh["tensor"], plan)
        share = sum(parameter.numel() for parameter in model.parameters()) / whole
        is_sharded = self.config.shards_state and self.topology.data > 1
        share /= self.topology.shard if is_sharded else 1
        self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)
        if not is_sharded:
            return TensorEngine(model, mesh, shards, plan.partial)
        shard_model(model, mesh, self.config)
        return TensorFsdpEngine(model, mesh, shards, plan.partial)


@torch.no_grad()
def _start_from_rank_0(model: nn.Module, device_type: str) -> None:
    """Start from rank 0's weights, as DDP does: ranks may have drawn their own. One tensor at a time is on a device."""
    world = dist.group.WORLD
    assert world is not None
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.to(device_type).contiguous()
        broadcast(sent, world)
        tensor.data.copy_(sent)


class TensorEngine(Engine):
    """The Trainer's own step on parts of matrices; replicas of the group average their gradients."""

    reduces_gradients = True
    optimizer_sees = Reach.element

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, shards: dict[str, ParameterShard], partial: frozenset[str]
    ) -> None:
        super().__init__(model)
        self._begin(mesh, shards, partial)

    def _begin(self, mesh: DeviceMesh, shards: dict[str, ParameterShard], partial: frozenset[str]) -> None:
        self._group = self.rows_group = mesh.get_group("tensor")
        self._rank = mesh.get_local_rank("tensor")
        self.loss_group = self._data_group = mesh.get_group("data")
        self._shards = shards
        self._partial = partial
        self._names: Any = WeakIdKeyDictionary()
        self._scaler: Any = None
        self._draws_alike = False

    def setup(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Keep the optimizer and the loss scale."""
        self._scaler, self._draws_alike = scaler, False
        return super().setup(prepared, optimizer, scaler)

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run forward and backward of a micro batch, which all ranks of the group were given.

        Raises:
            DataError: they were given different ones.
        """
        check_same_batch(batch, self._group, "tensor group")
        if not self._draws_alike:
            # Each rank draws the dropout masks of what it has whole; a resume sets the generators of each rank.
            _draw_alike(self._group)
            self._draws_alike = True
        return super().forward_backward(batch, num_items, hooks)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], hooks: TrainerHooks) -> list[Any]:
        """Run forwards together. The first rank of each group has values."""
        values = super().forward(batch, function, hooks)
        return values if self._rank == 0 else []

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """Add up the gradients of the ranks, then clip by the norm of the whole model; each parameter counts once."""
        self._reduce_gradients()
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer.optimizer)
        gradients = {n: local(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if name in self._shards or self._rank == 0]
        squared = torch.nn.utils.get_total_norm(counted).to(device_of(self._group), torch.float32) ** 2
        for group in self._norm_groups():
            squared = sum_in_order(squared, group)
        norm = squared.sqrt()
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose ranks hold different parts of the model."""
        return [self._group]

    def _reduce_gradients(self) -> None:
        parameters = dict(self.model.named_parameters())
        self._average_over_data(parameters.values())
        whole = {name: parameter for name, parameter in parameters.items() if name not in self._shards}
        for name, parameter in whole.items():
            if parameter.grad is not None and name not in self._partial:
                # All ranks have it, the same but for rounding that a device may do in any order.
                local(parameter.grad).div_(self._group.size())
        sum_gradients(whole.values(), self._group)

    def _average_over_data(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._data_group.size())
        sum_gradients(parameters, self._data_group)

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Give the shape that a parameter of `model` has in the whole model."""
        if parameter not in self._names:
            # FSDP2 has one tensor for a shard, and another for what is gathered.
            self._names.update({own: name for name, own in self.model.named_parameters()})
        shard = self._shards.get(self._names.get(parameter, ""))
        return super().whole_shape(parameter) if shard is None else shard.shape

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's parts, by names that say of which tensor rank they are."""
        return [
            (f"{name} of tensor rank {self._rank}" if name.partition("[")[0] in self._shards else name, tensor)
            for name, tensor in super().whole_parameters()
        ]

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of each tensor."""
        for piece in super().pieces():
            yield from self.own_pieces(piece)

    def own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give pieces of the whole model, from one of this rank's model as if that were whole."""
        if piece.name in self._shards and not is_number(piece.key):
            return self._shards[piece.name].pieces(piece)
        return [piece]

    def after_load(self) -> None:
        """Let the next step draw alike in each group."""
        super().after_load()
        self._draws_alike = False


class TensorFsdpEngine(TensorEngine, FsdpEngine):
    """FSDP2 over the data ranks of what each tensor rank has."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, shards: dict[str, ParameterShard], partial: frozenset[str]
    ) -> None:
        FsdpEngine.__init__(self, model)
        self._begin(mesh, shards, partial)
        self._shard_group = mesh.get_group("shard")

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        return [self._shard_group, self._group]

    def _average_over_data(self, parameters: Iterable[nn.Parameter]) -> None:
        """FSDP2 has done it."""


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


def check_plan(model: PreTrainedModel, pairs: DeviceMesh) -> None:
    """Refuse a type of model that does not train over tensor ranks as it does whole. A collective over all ranks.

    Args:
        model: whole.
        pairs: of the ranks that try it; axes `data` and `tensor`. The others wait.

    Raises:
        ConfigError: naming the first wrong parameter; on all ranks alike.
    """
    problem = None
    if pairs.get_coordinate() is not None:
        try:
            found = compare_small(model, pairs)
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


def compare_small(model: PreTrainedModel, mesh: DeviceMesh) -> Differences:
    """Make a small model of the class, and train it whole and sharded. All ranks of the mesh call it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = small_model(model)
        nn.Module.to(small, mesh.device_type)
        with torch.no_grad():
            for parameter in small.parameters():
                # Else ones and zeros, as of norms and biases, would hide what is wrong.
                parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.device))
    sharded = copy.deepcopy(small)
    whole_loss = _train(small)
    plan = make_plan(sharded, mesh.size(1))
    engine = TensorEngine(sharded, mesh, apply_plan(sharded, mesh["tensor"], plan), plan.partial)
    loss = _train(sharded)
    engine.clip_grad_norm(0.0, lambda: None)
    return _compare(engine, small, abs(loss - whole_loss) / abs(whole_loss))


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


def _compare(engine: TensorEngine, whole: nn.Module, loss: float) -> Differences:
    """Compare this rank's part of each gradient with that part of the whole one's."""
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    found: list[tuple[float, str]] = []
    for name, parameter in engine.model.named_parameters():
        reference, own = gradients[name], parameter.grad
        if reference is None or own is None:
            found.append((0.0 if reference is own else math.inf, name))
            continue
        pieces = engine.own_pieces(Piece(name=name, key=WEIGHT, shape=tuple(own.shape), start=0, view=own))
        squared: Any = sum((piece.view - piece.of_whole(reference)).norm() ** 2 for piece in pieces)
        # A gradient of nothing but rounding has no norm to compare with.
        found.append((float(squared.sqrt() / (reference.norm() + 1e-7)), name))
    worst, name = max(found, key=lambda item: (math.isnan(item[0]), item[0]))
    first = next((name for difference, name in found if not difference <= GRADIENT_BOUND), "")
    return Differences(loss=loss, gradient=worst, worst_parameter=name, first_wrong=first)
