"""Optimizers that look at whole parameters, where each rank has a part of them: every parameter is stepped by one rank.

The owner of a parameter gathers its parts and those of its gradient, steps it, and sends the parts back. Its state lies
with the owner, whole, so that state is shared out over the ranks as parameters are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hfdist.checkpoint.piece import WEIGHT, Piece, view_rows
from hfdist.collectives import gather_json
from hfdist.optim.muon import Group
from hfdist.strategies.gradients.reduction import local_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedParameter:
    """A parameter of which the ranks of a group have parts, each element once."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    group: dist.ProcessGroup
    own_pieces: Callable[[torch.Tensor], list[Piece]]
    """Gives pieces of the whole parameter from what this rank has of it, or from that of its gradient."""


class WholeSteps:
    """Replaces parameters of which this rank has a part by whole ones that it owns. Each step is a collective.

    Args:
        optimizer: whose groups hold all parameters, and which has no state yet.
        groups: those of its groups that need whole parameters.
        shared: the parameters of which ranks have parts, by id; the others stay where they are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Iterable[Group], shared: Mapping[int, ShardedParameter]
    ) -> None:
        self._shared: list[ShardedParameter] = []
        """All parameters of these groups, in the same order on each rank."""
        of_groups = []
        for group in groups:
            parts = [shared[id(parameter)] for parameter in group["params"] if id(parameter) in shared]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in shared]
            self._shared += parts
            of_groups.append((group, parts))
        self._owners: dict[ShardedParameter, int] = {}
        self._places: dict[ShardedParameter, list[list[Piece]]] = {}
        """What each rank of its group has of a parameter, without memory."""
        for alike in _alike(self._shared, lambda one: one.group):
            owners = _assign_owners([math.prod(one.shape) for one in alike], alike[0].group.size())
            self._owners |= dict(zip(alike, owners, strict=True))
            self._places |= dict(zip(alike, _gather_places(alike), strict=True))
        self._wholes: dict[ShardedParameter, nn.Parameter] = {}
        """Whole parameters that this rank owns, without memory between steps."""
        self.named: list[tuple[str, Group, nn.Parameter]] = []
        for group, parts in of_groups:
            for one in filter(self._is_own, parts):
                whole = nn.Parameter(local_tensor(one.parameter).new_empty(one.shape))
                whole.untyped_storage().resize_(0)
                self._wholes[one] = whole
                self.named.append((one.name, group, whole))
                group["params"].append(whole)
        optimizer.register_step_pre_hook(self._gather)
        optimizer.register_step_post_hook(self._send_back)

    def _is_own(self, one: ShardedParameter) -> bool:
        return self._owners[one] == one.group.rank()

    def _messages(self) -> Iterator[list[ShardedParameter]]:
        """What is trained, by group and type: a message has one."""
        trained = [one for one in self._shared if one.parameter.grad is not None]
        return _alike(trained, lambda one: (one.group, one.parameter.dtype))

    @torch.no_grad()
    def _gather(self, *_: object) -> None:
        for alike in self._messages():
            for one, value in self._to_owners(alike, [one.parameter for one in alike]):
                whole = self._wholes[one]
                whole.untyped_storage().resize_(value.nbytes)
                whole.copy_(value)
            gradients = [one.parameter.grad for one in alike if one.parameter.grad is not None]
            for one, value in self._to_owners(alike, gradients):
                self._wholes[one].grad = value

    @torch.no_grad()
    def _send_back(self, *_: object) -> None:
        for alike in self._messages():
            self._to_holders(alike)
        for whole in self._wholes.values():
            whole.grad = None
            whole.untyped_storage().resize_(0)

    def _to_owners(
        self, alike: list[ShardedParameter], values: list[torch.Tensor]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Give the whole values of the parameters that this rank owns; `values`: what it has of each."""
        like, ranks = local_tensor(values[0]), range(alike[0].group.size())
        sent: list[list[torch.Tensor]] = [[] for _ in ranks]
        for one, value in zip(alike, values, strict=True):
            sent[self._owners[one]] += [piece.view for piece in one.own_pieces(value)]
        wholes = [(one, like.new_empty(one.shape)) for one in alike if self._is_own(one)]
        taken = self._views_of_ranks(wholes, ranks)
        _exchange(sent, taken, like, alike[0].group)
        return wholes

    def _to_holders(self, alike: list[ShardedParameter]) -> None:
        """Set what this rank has of each parameter from the whole ones of their owners."""
        like, ranks = local_tensor(alike[0].parameter), range(alike[0].group.size())
        wholes = [(one, self._wholes[one].detach()) for one in alike if self._is_own(one)]
        sent = self._views_of_ranks(wholes, ranks)
        taken: list[list[torch.Tensor]] = [[] for _ in ranks]
        for one in alike:
            taken[self._owners[one]] += [piece.view for piece in one.own_pieces(one.parameter)]
        _exchange(sent, taken, like, alike[0].group)

    def _views_of_ranks(
        self, wholes: Iterable[tuple[ShardedParameter, torch.Tensor]], ranks: Iterable[int]
    ) -> list[list[torch.Tensor]]:
        """Give the views of whole values that each rank has."""
        return [
            [_elements(whole, place) for one, whole in wholes for place in self._places[one][rank]] for rank in ranks
        ]


def _exchange(
    sent: list[list[torch.Tensor]], taken: list[list[torch.Tensor]], like: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Send views to each rank of a group, and copy what comes from each into other views. A collective."""
    flat = torch.cat([like.new_empty(0), *(view.flatten() for of_rank in sent for view in of_rank)])
    num_sent, num_taken = ([sum(view.numel() for view in of_rank) for of_rank in views] for views in (sent, taken))
    received = like.new_empty(sum(num_taken))
    dist.all_to_all_single(received, flat, num_taken, num_sent, group=group)
    views = [view for of_rank in taken for view in of_rank]
    for view, values in zip(views, received.split([view.numel() for view in views]), strict=True):
        view.copy_(values.view(view.shape))


def _elements(whole: torch.Tensor, place: Piece) -> torch.Tensor:
    return view_rows(whole.view(-1)[place.start : place.stop], place.run, place.pitch)


def _gather_places(alike: list[ShardedParameter]) -> list[list[list[Piece]]]:
    """Give what each rank of a group has of each parameter. A collective."""
    own = [
        [(piece.start, piece.run, piece.pitch, piece.view.numel()) for piece in one.own_pieces(one.parameter)]
        for one in alike
    ]

    def place(one: ShardedParameter, start: int, run: int, pitch: int, numel: int) -> Piece:
        view = torch.empty(numel, device="meta")
        return Piece(name=one.name, key=WEIGHT, shape=one.shape, start=start, run=run, pitch=pitch, view=view)

    of_ranks = gather_json(own, alike[0].group)
    return [[[place(one, *numbers) for numbers in of_rank[n]] for of_rank in of_ranks] for n, one in enumerate(alike)]


def _assign_owners(sizes: list[int], num_ranks: int) -> list[int]:
    """Give each parameter an owner, so that all own about as many elements: the largest first, to who has least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def _alike(
    shared: list[ShardedParameter], key: Callable[[ShardedParameter], Hashable]
) -> Iterator[list[ShardedParameter]]:
    """Groups of parameters with equal keys, in one order on all ranks."""
    by_key: dict[Hashable, list[ShardedParameter]] = defaultdict(list)
    for one in shared:
        by_key[key(one)].append(one)
    yield from by_key.values()
