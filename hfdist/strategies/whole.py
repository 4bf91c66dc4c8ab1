"""Steps of optimizers that must see whole parameters, where each rank has a part: one rank, the owner, steps each one.

    before a step      rank 0: A0 G0    rank 1: A1 G1      parts of a parameter A, and of its gradient G
    in the step        rank 0: A G                         the owner of A has gathered them, and steps A
    after the step     rank 0: A0       rank 1: A1         it has sent the new parts back

A parameter's state lies whole with its owner, so that state is shared out over the ranks as parameters are. An owner
that has all of a parameter already, as for most under ZeRO-1 and 2, exchanges nothing.
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
    """A parameter of which the ranks of a group have parts; one rank has each element."""

    name: str
    """Name of the parameter in the model."""
    held: torch.Tensor
    """The tensor that the optimizer has on this rank: its part of the parameter, or a flat buffer of many parts."""
    options: Group
    """The optimizer's parameter group that the parameter is in."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    group: dist.ProcessGroup
    """The ranks that have the parts."""
    own_pieces: Callable[[torch.Tensor], list[Piece]]
    """Gives this rank's pieces of the whole parameter as views of `held`; of its gradient as views of `held.grad`."""


class Region(NamedTuple):
    """The elements of a flattened parameter that a `Piece` has, by the numbers of the piece.

    start  #### . . #### . . #### stop      `run` elements of every `pitch`; both are 0 where no element is left out
    """

    start: int
    stop: int
    run: int = 0
    pitch: int = 0


Regions: TypeAlias = list[list[Region]]
"""The regions of one parameter that each rank of a group has, by rank."""


class WholeSteps:
    """Hooks of an optimizer by which it steps the whole parameters that this rank owns, in place of the parts it holds.

    Each step is a collective. A parameter that one rank has whole already is owned by it, and is not sent.

    Args:
        optimizer: an optimizer without state; the hooks are registered on it.
        regions: the regions of each parameter by rank, with the parameters in the same order on each rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, regions: Mapping[ShardedParameter, Regions]) -> None:
        self._by_held: dict[int, list[ShardedParameter]] = defaultdict(list)
        """The parameters with parts in a held tensor, by the tensor's id."""
        self._owners: dict[ShardedParameter, int] = {}
        """The rank in its group that owns each parameter."""
        self._undivided: set[ShardedParameter] = set()
        """Parameters that their owners have whole already."""
        for shards in _split_by(list(regions), lambda shard: shard.group):
            holders = [_find_holder(shard, regions[shard]) for shard in shards]
            self._undivided |= {shard for shard, holder in zip(shards, holders, strict=True) if holder is not None}
            sizes = [math.prod(shard.shape) for shard in shards]
            self._owners |= dict(zip(shards, _assign_owners(sizes, holders, shards[0].group.size()), strict=True))
        self._wholes: dict[ShardedParameter, nn.Parameter] = {}
        """Whole parameters that this rank owns, without memory between steps."""
        self._regions: dict[ShardedParameter, Regions] = {}
        """Regions of the parameters that this rank owns; of all, they would be as many as parameters times ranks."""
        for shard, of_ranks in regions.items():
            self._by_held[id(shard.held)].append(shard)
            if self._owners[shard] == shard.group.rank():
                self._wholes[shard], self._regions[shard] = nn.Parameter(_outline(shard)), of_ranks
        self._stepped: list[ShardedParameter] = []
        """Parameters that the running step changes; empty between steps."""
        self._replaced: list[tuple[Group, list[torch.Tensor]]] = []
        """Groups that hold whole parameters in the running step, with the tensors that they hold between steps."""
        optimizer.register_step_pre_hook(self._gather)
        optimizer.register_step_post_hook(self._send_back)

    def replaces(self, held: torch.Tensor) -> bool:
        """Whether whole parameters are stepped in place of a held tensor, for which the optimizer has no state then."""
        return id(held) in self._by_held

    def named(self) -> Iterator[tuple[str, Group, nn.Parameter]]:
        """List the whole parameters of which this rank has the state, with their groups."""
        for shard, whole in self._wholes.items():
            yield shard.name, shard.options, whole

    def _messages(self) -> Iterator[list[ShardedParameter]]:
        """Give the parameters that travel in this step, by group and type: a message has values of one type."""
        divided = [shard for shard in self._stepped if shard not in self._undivided]
        return _split_by(divided, lambda shard: (shard.group, shard.held.dtype))

    @torch.no_grad()
    def _gather(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step: put the whole parameters that this rank owns into the optimizer, and fill them."""
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
                (held_piece,) = shard.own_pieces(shard.held)
                (gradient_piece,) = shard.own_pieces(_gradient(shard))
                whole.data = held_piece.view.view(shard.shape)
                whole.grad = gradient_piece.view.view(shard.shape)
        for shards in self._messages():
            for shard, value in self._to_owners(shards, [shard.held for shard in shards]):
                self._wholes[shard].data = value
            for shard, value in self._to_owners(shards, [_gradient(shard) for shard in shards]):
                self._wholes[shard].grad = value

    @torch.no_grad()
    def _send_back(self, *_: object) -> None:
        """After a step: send the parts back to the ranks that hold them, and give the optimizer its tensors again."""
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
        """Exchange parts, and give the whole values of the parameters that this rank owns. A collective.

        `values` are like `held` of each parameter: that tensor itself, or its gradient.
        """
        like, ranks = local_tensor(values[0]), range(shards[0].group.size())
        sent: list[list[torch.Tensor]] = [[] for _ in ranks]
        for shard, value in zip(shards, values, strict=True):
            sent[self._owners[shard]] += [piece.view for piece in shard.own_pieces(value)]
        wholes = [(shard, like.new_empty(shard.shape)) for shard in shards if shard in self._wholes]
        _exchange(sent, self._views_of_ranks(wholes, ranks), like, shards[0].group)
        return wholes

    def _to_holders(self, shards: list[ShardedParameter]) -> None:
        """Set this rank's part of each parameter from the owner's whole one. A collective."""
        like, ranks = local_tensor(shards[0].held), range(shards[0].group.size())
        wholes = [(shard, self._wholes[shard].detach()) for shard in shards if shard in self._wholes]
        received: list[list[torch.Tensor]] = [[] for _ in ranks]
        for shard in shards:
            received[self._owners[shard]] += [piece.view for piece in shard.own_pieces(shard.held)]
        _exchange(self._views_of_ranks(wholes, ranks), received, like, shards[0].group)

    def _views_of_ranks(
        self, wholes: Iterable[tuple[ShardedParameter, torch.Tensor]], ranks: Iterable[int]
    ) -> list[list[torch.Tensor]]:
        """Give, for each rank, views of the parts of whole values that the rank holds."""
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
    """Send the views in `sent` to the ranks of a group, and fill the views in `received` from them. A collective.

    Both lists have the views for each rank; `like` gives the type.
    """
    flat = torch.cat([like.new_empty(0), *(view.flatten() for views in sent for view in views)])
    num_sent = [sum(view.numel() for view in views) for views in sent]
    num_received = [sum(view.numel() for view in views) for views in received]
    # Offloaded parameters travel through the device.
    flat = flat.to(device_of(group))
    buffer = flat.new_empty(sum(num_received))
    dist.all_to_all_single(buffer, flat, num_received, num_sent, group=group)
    filled = [view for views in received for view in views]
    for view, values in zip(filled, buffer.split([view.numel() for view in filled]), strict=True):
        view.copy_(values.view(view.shape))


def _elements(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Give a view of a region of a whole value."""
    return view_rows(whole.view(-1)[region.start : region.stop], region.run, region.pitch)


def gather_regions(shared: list[ShardedParameter]) -> dict[ShardedParameter, Regions]:
    """Exchange the regions of parameters between the ranks of each group, and give them by parameter. A collective."""
    regions: dict[ShardedParameter, Regions] = {shard: [] for shard in shared}
    for shards in _split_by(shared, lambda shard: shard.group):
        own = [[(p.start, p.stop, p.run, p.pitch) for p in shard.own_pieces(shard.held)] for shard in shards]
        of_ranks = gather_json(own, shards[0].group)
        for index, shard in enumerate(shards):
            regions[shard] = [[Region(*numbers) for numbers in of_rank[index]] for of_rank in of_ranks]
    return regions


def _find_holder(shard: ShardedParameter, of_ranks: Regions) -> int | None:
    """Give the rank that has all of a parameter in one piece; None: no rank has."""
    of_all = [Region(0, math.prod(shard.shape))]
    return next((rank for rank, regions in enumerate(of_ranks) if regions == of_all), None)


def _assign_owners(sizes: list[int], holders: list[int | None], num_ranks: int) -> list[int]:
    """Give the owner of each parameter: its holder; of the others, the largest first, the rank that then owns least.

    `sizes` are elements, and `holders` the ranks that have all of a parameter; None: no rank has.
    """
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
