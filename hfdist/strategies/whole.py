"""Optimizers that look at whole parameters, where each rank has a part of them: every parameter is stepped by one rank.

The owner of a parameter gathers its parts and those of its gradient, steps it, and sends the parts back. Its state
lies with the owner, whole, so that state is shared out over the ranks as parameters are. An owner that has all of it
already, as of most under ZeRO-1 and 2, sends nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from hfdist.checkpoint.piece import Piece, view_rows
from hfdist.collectives import device_of, gather_json
from hfdist.optim.joined import Group
from hfdist.strategies.gradients.reduction import local_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedParameter:
    """A parameter of which the ranks of a group have parts, each element once."""

    name: str
    held: torch.Tensor
    """What the optimizer has on this rank: its part of the parameter, or a flat buffer with parts of several."""
    options: Group
    """The optimizer's group of it."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    group: dist.ProcessGroup
    own_pieces: Callable[[torch.Tensor], list[Piece]]
    """Gives this rank's pieces of the whole parameter from `held`, or those of the gradient from its gradient."""


class Region(NamedTuple):
    """Which elements of a parameter a `Piece` of it has, with the fields of the piece."""

    start: int
    stop: int
    run: int = 0
    pitch: int = 0


Regions: TypeAlias = list[list[Region]]
"""What each rank of a group has of a parameter."""


class WholeSteps:
    """While an optimizer steps, whole parameters that this rank owns stand for those that it has parts of.

    Each step is a collective. What one rank has whole already is its own, and stays where it is.

    Args:
        optimizer: which has no state yet.
        regions: of each parameter; in the same order on each rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, regions: Mapping[ShardedParameter, Regions]) -> None:
        self._by_held: dict[int, list[ShardedParameter]] = defaultdict(list)
        """Parameters by the id of what is held."""
        self._owners: dict[ShardedParameter, int] = {}
        self._undivided: set[ShardedParameter] = set()
        """What its owner has whole already."""
        for shards in _split_by(list(regions), lambda shard: shard.group):
            holders = [_find_holder(shard, regions[shard]) for shard in shards]
            self._undivided |= {shard for shard, holder in zip(shards, holders, strict=True) if holder is not None}
            sizes = [math.prod(shard.shape) for shard in shards]
            self._owners |= dict(zip(shards, _assign_owners(sizes, holders, shards[0].group.size()), strict=True))
        self._wholes: dict[ShardedParameter, nn.Parameter] = {}
        """Whole parameters that this rank owns, without memory between steps."""
        self._regions: dict[ShardedParameter, Regions] = {}
        """Regions of the owned parameters alone: those of all would be parameters times ranks."""
        for shard, of_ranks in regions.items():
            self._by_held[id(shard.held)].append(shard)
            if self._owners[shard] == shard.group.rank():
                self._wholes[shard], self._regions[shard] = nn.Parameter(_outline(shard)), of_ranks
        self._stepped: list[ShardedParameter] = []
        """What the step that runs changes; empty between steps."""
        self._replaced: list[tuple[Group, list[torch.Tensor]]] = []
        """Groups and what they hold between steps."""
        optimizer.register_step_pre_hook(self._gather)
        optimizer.register_step_post_hook(self._send_back)

    def replaces(self, held: torch.Tensor) -> bool:
        """Whether others are stepped in place of what an optimizer holds, so that there is no state of it."""
        return id(held) in self._by_held

    def named(self) -> Iterator[tuple[str, Group, nn.Parameter]]:
        """List the whole parameters of which this rank has the state, with their groups."""
        for shard, whole in self._wholes.items():
            yield shard.name, shard.options, whole

    def _messages(self) -> Iterator[list[ShardedParameter]]:
        """What is sent, by group and type: a message has one type."""
        divided = [shard for shard in self._stepped if shard not in self._undivided]
        return _split_by(divided, lambda shard: (shard.group, shard.held.dtype))

    @torch.no_grad()
    def _gather(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            held = group["params"]
            stepped = [shard for part in held if part.grad is not None for shard in self._by_held.get(id(part), ())]
            if stepped:
                self._stepped += stepped
                self._replaced.append((group, held))
                owned = [self._wholes[shard] for shard in stepped if shard in self._wholes]
                group["params"] = [part for part in held if not self.replaces(part)] + owned
        for shard in self._stepped:
            if shard in self._undivided and shard in self._wholes:
                whole = self._wholes[shard]
                whole.data, whole.grad = (
                    shard.own_pieces(held)[0].view.view(shard.shape) for held in (shard.held, _gradient(shard))
                )
        for shards in self._messages():
            for shard, value in self._to_owners(shards, [shard.held for shard in shards]):
                self._wholes[shard].data = value
            for shard, value in self._to_owners(shards, [_gradient(shard) for shard in shards]):
                self._wholes[shard].grad = value

    @torch.no_grad()
    def _send_back(self, *_: object) -> None:
        for shards in self._messages():
            self._to_holders(shards)
        for shard in self._stepped:
            if shard in self._wholes:
                self._wholes[shard].data, self._wholes[shard].grad = _outline(shard), None
        for group, held in self._replaced:
            group["params"] = held
        self._stepped, self._replaced = [], []

    def _to_owners(
        self, shards: list[ShardedParameter], values: list[torch.Tensor]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Give the whole values of the parameters that this rank owns; `values`: what it has of each."""
        like, ranks = local_tensor(values[0]), range(shards[0].group.size())
        sent: list[list[torch.Tensor]] = [[] for _ in ranks]
        for shard, value in zip(shards, values, strict=True):
            sent[self._owners[shard]] += [piece.view for piece in shard.own_pieces(value)]
        wholes = [(shard, like.new_empty(shard.shape)) for shard in shards if shard in self._wholes]
        _exchange(sent, self._views_of_ranks(wholes, ranks), like, shards[0].group)
        return wholes

    def _to_holders(self, shards: list[ShardedParameter]) -> None:
        """Set what this rank has of each parameter from the whole ones of their owners."""
        like, ranks = local_tensor(shards[0].held), range(shards[0].group.size())
        wholes = [(shard, self._wholes[shard].detach()) for shard in shards if shard in self._wholes]
        received: list[list[torch.Tensor]] = [[] for _ in ranks]
        for shard in shards:
            received[self._owners[shard]] += [piece.view for piece in shard.own_pieces(shard.held)]
        _exchange(self._views_of_ranks(wholes, ranks), received, like, shards[0].group)

    def _views_of_ranks(
        self, wholes: Iterable[tuple[ShardedParameter, torch.Tensor]], ranks: Iterable[int]
    ) -> list[list[torch.Tensor]]:
        """Give the views of whole values that each rank has."""
        return [
            [_elements(whole, region) for shard, whole in wholes for region in self._regions[shard][rank]]
            for rank in ranks
        ]


def _gradient(shard: ShardedParameter) -> torch.Tensor:
    assert shard.held.grad is not None
    return shard.held.grad


def _outline(shard: ShardedParameter) -> torch.Tensor:
    """Give a tensor of the whole shape, without memory for it."""
    return local_tensor(shard.held).new_empty(1).expand(shard.shape)


def _exchange(
    sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]], like: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Send views to each rank of a group, and copy what comes from each into other views. A collective."""
    flat = torch.cat([like.new_empty(0), *(view.flatten() for of_rank in sent for view in of_rank)])
    num_sent, num_received = (
        [sum(view.numel() for view in of_rank) for of_rank in of_ranks] for of_ranks in (sent, received)
    )
    # What is offloaded travels through the device.
    flat = flat.to(device_of(group))
    buffer = flat.new_empty(sum(num_received))
    dist.all_to_all_single(buffer, flat, num_received, num_sent, group=group)
    views = [view for of_rank in received for view in of_rank]
    for view, values in zip(views, buffer.split([view.numel() for view in views]), strict=True):
        view.copy_(values.view(view.shape))


def _elements(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return view_rows(whole.view(-1)[region.start : region.stop], region.run, region.pitch)


def gather_regions(shared: list[ShardedParameter]) -> dict[ShardedParameter, Regions]:
    """Let the ranks of each group tell each other what they have of the parameters. A collective."""
    regions: dict[ShardedParameter, Regions] = {shard: [] for shard in shared}
    for shards in _split_by(shared, lambda shard: shard.group):
        own = [[(p.start, p.stop, p.run, p.pitch) for p in shard.own_pieces(shard.held)] for shard in shards]
        of_ranks = gather_json(own, shards[0].group)
        for index, shard in enumerate(shards):
            regions[shard] = [[Region(*numbers) for numbers in of_rank[index]] for of_rank in of_ranks]
    return regions


def _find_holder(shard: ShardedParameter, of_ranks: Regions) -> int | None:
    """Give the rank that has all of a parameter in one piece."""
    of_all = [Region(0, math.prod(shard.shape))]
    return next((rank for rank, regions in enumerate(of_ranks) if regions == of_all), None)


def _assign_owners(sizes: list[int], holders: list[int | None], num_ranks: int) -> list[int]:
    """Give each parameter an owner: who has all of it; the others the largest first to who then owns least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (holders[index] is None, -sizes[index])):
        holder = holders[index]
        owners[index] = loads.index(min(loads)) if holder is None else holder
        loads[owners[index]] += sizes[index]
    return owners


def _split_by(
    shards: list[ShardedParameter], key: Callable[[ShardedParameter], Hashable]
) -> Iterator[list[ShardedParameter]]:
    """Give the parameters with equal keys together, in one order on all ranks."""
    by_key: dict[Hashable, list[ShardedParameter]] = defaultdict(list)
    for shard in shards:
        by_key[key(shard)].append(shard)
    yield from by_key.values()
