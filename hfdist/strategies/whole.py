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


class Place(NamedTuple):
    """Where a `Piece` of a parameter lies in it."""

    start: int
    stop: int
    run: int = 0
    pitch: int = 0


Places: TypeAlias = list[list[Place]]
"""What each rank of a group has of a parameter."""


class WholeSteps:
    """While an optimizer steps, whole parameters that this rank owns stand for those that it has parts of.

    Each step is a collective. What one rank has whole already is its own, and stays where it is.

    Args:
        optimizer: which has no state yet.
        places: in the same order on each rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, places: Mapping[ShardedParameter, Places]) -> None:
        self._shared: dict[int, list[ShardedParameter]] = defaultdict(list)
        """By the id of what is held."""
        self._owners: dict[ShardedParameter, int] = {}
        self._undivided: set[ShardedParameter] = set()
        """What its owner has whole already."""
        for alike in _alike(list(places), lambda one: one.group):
            holders = [_find_holder(one, places[one]) for one in alike]
            self._undivided |= {one for one, holder in zip(alike, holders, strict=True) if holder is not None}
            sizes = [math.prod(one.shape) for one in alike]
            self._owners |= dict(zip(alike, _assign_owners(sizes, holders, alike[0].group.size()), strict=True))
        self._wholes: dict[ShardedParameter, nn.Parameter] = {}
        """Whole parameters that this rank owns, without memory between steps."""
        self._places: dict[ShardedParameter, Places] = {}
        """Of these alone: of all they would be parameters times ranks."""
        for one, of_ranks in places.items():
            self._shared[id(one.held)].append(one)
            if self._owners[one] == one.group.rank():
                self._wholes[one], self._places[one] = nn.Parameter(_outline(one)), of_ranks
        self._now: list[ShardedParameter] = []
        """What is stepped now."""
        self._replaced: list[tuple[Group, list[torch.Tensor]]] = []
        """Groups and what they hold between steps."""
        optimizer.register_step_pre_hook(self._gather)
        optimizer.register_step_post_hook(self._send_back)

    def replaces(self, held: torch.Tensor) -> bool:
        """Whether others are stepped in the place of what an optimizer holds, so that there is no state of it."""
        return id(held) in self._shared

    def named(self) -> Iterator[tuple[str, Group, nn.Parameter]]:
        """List the whole parameters of which this rank has the state, with their groups."""
        for one, whole in self._wholes.items():
            yield one.name, one.options, whole

    def _messages(self) -> Iterator[list[ShardedParameter]]:
        """What is sent, by group and type: a message has one."""
        divided = [one for one in self._now if one not in self._undivided]
        return _alike(divided, lambda one: (one.group, one.held.dtype))

    @torch.no_grad()
    def _gather(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            held = group["params"]
            now = [one for part in held if part.grad is not None for one in self._shared.get(id(part), ())]
            if now:
                self._now += now
                self._replaced.append((group, held))
                own = [self._wholes[one] for one in now if one in self._wholes]
                group["params"] = [part for part in held if not self.replaces(part)] + own
        for one in self._now:
            if one in self._undivided and one in self._wholes:
                value, gradient = (one.own_pieces(held)[0].view.view(one.shape) for held in (one.held, _gradient(one)))
                self._wholes[one].data, self._wholes[one].grad = value, gradient
        for alike in self._messages():
            for one, value in self._to_owners(alike, [one.held for one in alike]):
                self._wholes[one].data = value
            for one, value in self._to_owners(alike, [_gradient(one) for one in alike]):
                self._wholes[one].grad = value

    @torch.no_grad()
    def _send_back(self, *_: object) -> None:
        for alike in self._messages():
            self._to_holders(alike)
        for one in self._now:
            if one in self._wholes:
                self._wholes[one].data, self._wholes[one].grad = _outline(one), None
        for group, held in self._replaced:
            group["params"] = held
        self._now, self._replaced = [], []

    def _to_owners(
        self, alike: list[ShardedParameter], values: list[torch.Tensor]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Give the whole values of the parameters that this rank owns; `values`: what it has of each."""
        like, ranks = local_tensor(values[0]), range(alike[0].group.size())
        sent: list[list[torch.Tensor]] = [[] for _ in ranks]
        for one, value in zip(alike, values, strict=True):
            sent[self._owners[one]] += [piece.view for piece in one.own_pieces(value)]
        wholes = [(one, like.new_empty(one.shape)) for one in alike if one in self._wholes]
        taken = self._views_of_ranks(wholes, ranks)
        _exchange(sent, taken, like, alike[0].group)
        return wholes

    def _to_holders(self, alike: list[ShardedParameter]) -> None:
        """Set what this rank has of each parameter from the whole ones of their owners."""
        like, ranks = local_tensor(alike[0].held), range(alike[0].group.size())
        wholes = [(one, self._wholes[one].detach()) for one in alike if one in self._wholes]
        sent = self._views_of_ranks(wholes, ranks)
        taken: list[list[torch.Tensor]] = [[] for _ in ranks]
        for one in alike:
            taken[self._owners[one]] += [piece.view for piece in one.own_pieces(one.held)]
        _exchange(sent, taken, like, alike[0].group)

    def _views_of_ranks(
        self, wholes: Iterable[tuple[ShardedParameter, torch.Tensor]], ranks: Iterable[int]
    ) -> list[list[torch.Tensor]]:
        """Give the views of whole values that each rank has."""
        return [
            [_elements(whole, place) for one, whole in wholes for place in self._places[one][rank]] for rank in ranks
        ]


def _gradient(one: ShardedParameter) -> torch.Tensor:
    assert one.held.grad is not None
    return one.held.grad


def _outline(one: ShardedParameter) -> torch.Tensor:
    """Give a tensor of the whole shape, without memory for it."""
    return local_tensor(one.held).new_empty(1).expand(one.shape)


def _exchange(
    sent: list[list[torch.Tensor]], taken: list[list[torch.Tensor]], like: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Send views to each rank of a group, and copy what comes from each into other views. A collective."""
    flat = torch.cat([like.new_empty(0), *(view.flatten() for of_rank in sent for view in of_rank)])
    num_sent, num_taken = ([sum(view.numel() for view in of_rank) for of_rank in views] for views in (sent, taken))
    # What is offloaded travels through the device.
    flat = flat.to(device_of(group))
    received = flat.new_empty(sum(num_taken))
    dist.all_to_all_single(received, flat, num_taken, num_sent, group=group)
    views = [view for of_rank in taken for view in of_rank]
    for view, values in zip(views, received.split([view.numel() for view in views]), strict=True):
        view.copy_(values.view(view.shape))


def _elements(whole: torch.Tensor, place: Place) -> torch.Tensor:
    return view_rows(whole.view(-1)[place.start : place.stop], place.run, place.pitch)


def gather_places(shared: list[ShardedParameter]) -> dict[ShardedParameter, Places]:
    """Let the ranks of each group tell each other what they have of the parameters. A collective."""
    places: dict[ShardedParameter, Places] = {one: [] for one in shared}
    for alike in _alike(shared, lambda one: one.group):
        own = [[(p.start, p.stop, p.run, p.pitch) for p in one.own_pieces(one.held)] for one in alike]
        of_ranks = gather_json(own, alike[0].group)
        for n, one in enumerate(alike):
            places[one] = [[Place(*numbers) for numbers in of_rank[n]] for of_rank in of_ranks]
    return places


def _find_holder(one: ShardedParameter, of_ranks: Places) -> int | None:
    """Give the rank that has all of a parameter in one piece."""
    of_all = [Place(0, math.prod(one.shape))]
    return next((rank for rank, places in enumerate(of_ranks) if places == of_all), None)


def _assign_owners(sizes: list[int], holders: list[int | None], num_ranks: int) -> list[int]:
    """Give each parameter an owner: who has all of it; the others the largest first to who then owns least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (holders[place] is None, -sizes[place])):
        holder = holders[place]
        owners[place] = loads.index(min(loads)) if holder is None else holder
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
