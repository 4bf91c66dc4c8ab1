"""The part of each parameter that a rank holds before FSDP2 shards it, and the groups that hold the other parts.

    tensor group    its ranks share matrices, read the same tokens, and compute one loss together
    expert group    its ranks share experts; each reads other tokens, and sends a token to the rank of its expert

All other parameters are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hfdist.checkpoint.piece import Piece, is_number
from hfdist.collectives import broadcast, device_of
from hfdist.strategies.gradients.reduction import average_gradients, divide_gradients, sum_gradients
from hfdist.strategies.parameter_shards import EXPERT, TENSOR, ParameterShard
from hfdist.strategies.same_batch import check_same_batch


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups that this rank belongs to; None: a group of this rank alone."""

    tensor: dist.ProcessGroup | None = None
    """The ranks that share matrices with this one."""
    expert: dist.ProcessGroup | None = None
    """The ranks that share experts with this one."""
    tokens: dist.ProcessGroup | None = None
    """The ranks with this rank's index in their tensor groups; each reads other tokens."""
    tokens_of_experts: dist.ProcessGroup | None = None
    """The ranks of `tokens` that hold the same experts as this one."""

    def of(self, axis: str | None) -> dist.ProcessGroup | None:
        """Give the group of an axis, TENSOR or EXPERT; None for any other, whose ranks share no parameters."""
        if axis == TENSOR:
            return self.tensor
        if axis == EXPERT:
            return self.expert
        return None


class ModelParts:
    """This rank's part of each parameter, and the groups of ranks that have the other parts.

    Args:
        groups: the groups of this rank.
        shards: this rank's parts of parameters, by the axis that shares them and then by name; other parameters are
            whole.
        partial: names of parameters that are whole on each tensor rank, and whose gradient is the sum of the gradients
            of the tensor ranks.
        experts: names of the modules whose parameters expert ranks share.
    """

    def __init__(
        self,
        groups: Groups,
        shards: Mapping[str, Mapping[str, ParameterShard]],
        partial: frozenset[str] = frozenset(),
        experts: Sequence[str] = (),
    ) -> None:
        self.groups = groups
        self._experts = experts
        self.description = ""
        """One line for people about how parameters are shared."""
        self._shards = {name: shard for of_axis in shards.values() for name, shard in of_axis.items()}
        self._axes = {name: axis for axis, of_axis in shards.items() for name in of_axis}
        # A tensor rank computes experts for its share of the tokens, so gradients of experts are parts as well.
        self._partial = partial | frozenset(shards.get(EXPERT, ()))
        self._names = WeakIdKeyDictionary()
        self._draws_alike = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its tensor group, and stands for it where all have computed the same."""
        return _rank(self.groups.tensor) == 0

    def begin(self, batch: dict[str, torch.Tensor]) -> None:
        """Prepare for a forward of a batch in training. A collective.

        The first time after a start or a load, the ranks of a tensor group begin to draw the same random numbers.

        Raises:
            DataError: the ranks of a tensor group were given different batches.
        """
        group = self.groups.tensor
        if group is None:
            return
        check_same_batch(batch, group, "tensor group")
        if not self._draws_alike:
            # Each rank draws the dropout masks of what it has whole; a resume sets the generators of each rank.
            _draw_alike(group)
            self._draws_alike = True

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over the ranks that hold the same parts and read other tokens, in place. A collective."""
        named = list(model.named_parameters())
        experts = [parameter for name, parameter in named if self._axes.get(name) == EXPERT]
        others = [parameter for name, parameter in named if self._axes.get(name) != EXPERT]
        for parameters, group in ((others, self.groups.tokens), (experts, self.groups.tokens_of_experts)):
            if group is not None:
                average_gradients(parameters, group)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Give parameters one gradient over the groups that share parameters, in place. A collective.

        Parameters that are whole on tensor ranks have their gradients averaged, or added up where each rank has only a
        part of the gradient. Gradients of experts have come from all tokens of an expert group: they are sums of what
        would be averaged, and are divided.
        """
        named = dict(model.named_parameters())
        if self.groups.expert is not None:
            experts = (p for name, p in named.items() if self._axes.get(name) == EXPERT)
            divide_gradients(experts, self.groups.expert.size())
        group = self.groups.tensor
        if group is not None:
            whole = {name: p for name, p in named.items() if self._axes.get(name) != TENSOR}
            # All ranks have these, the same but for rounding that a device may do in any order.
            divide_gradients((p for name, p in whole.items() if name not in self._partial), group.size())
            sum_gradients(whole.values(), group)

    def counts(self, name: str, axes: Iterable[str]) -> bool:
        """Whether this rank counts a parameter's gradient in a norm over the groups of `axes`, where each counts once.

        Each rank counts its parts, and the first rank counts whole parameters.
        """
        return all(_rank(self.groups.of(axis)) == 0 for axis in axes if axis != self._axes.get(name))

    def whole_shape(self, model: nn.Module, parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Give the shape in the whole model of a parameter that has `shape` in this rank's model."""
        if parameter not in self._names:
            # FSDP2 has one tensor for a shard, and another one for the gathered parameter.
            self._names.update({of_model: name for name, of_model in model.named_parameters()})
        shard = self._shards.get(self._names.get(parameter, ""))
        return shape if shard is None else shard.shape

    def axis(self, name: str) -> str | None:
        """Give the axis whose ranks have parts of a parameter; None: the parameter is whole."""
        return self._axes.get(name)

    def name_part(self, name: str) -> str:
        """Give the name of a parameter with its axis and rank, if this rank has a part of it; else the name itself."""
        axis = self._axes.get(name.partition("[")[0])
        return name if axis is None else f"{name} of {axis} rank {_rank(self.groups.of(axis))}"

    def own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give the pieces of the whole model's tensor that a piece of this rank's model is."""
        if piece.name in self._shards and not is_number(piece.key):
            return self._shards[piece.name].pieces(piece)
        return [piece]

    def list_experts(self, model: nn.Module) -> Iterator[nn.Module]:
        """List the modules whose parameters are shared out over expert ranks."""
        return map(model.get_submodule, self._experts)

    def after_load(self) -> None:
        """Let the ranks of each tensor group begin anew to draw the same random numbers, at the next step."""
        self._draws_alike = False


def _rank(group: dist.ProcessGroup | None) -> int:
    """Give this rank's index in a group; 0 in a group of itself alone."""
    return 0 if group is None else group.rank()


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
