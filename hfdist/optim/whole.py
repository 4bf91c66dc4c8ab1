"""Optimizers that look at whole parameters, where each rank has rows of them: every parameter is stepped by one rank.

The owner of a parameter gathers its rows and those of its gradient, steps it, and sends the rows back. Its state lies
with the owner, whole, so that state is shared out over the ranks as rows are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

Group = dict[str, Any]


class WholeSteps:
    """Replaces DTensors in an optimizer's groups by whole parameters that this rank owns. Each step is a collective.

    Args:
        optimizer: whose groups hold the DTensors of all parameters, and not yet any state.
        groups: those of its groups that need whole parameters.
        names: of all parameters, by id.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Iterable[Group], names: dict[int, str]) -> None:
        self._rows: list[DTensor] = []
        """All parameters of these groups, in the same order on each rank."""
        of_groups = [(group, list(group["params"])) for group in groups]
        for _, parameters in of_groups:
            self._rows += parameters
        mesh = self._rows[0].device_mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        owners = _assign_owners([parameter.numel() for parameter in self._rows], self._group.size())
        self._owners = {id(parameter): owner for parameter, owner in zip(self._rows, owners, strict=True)}
        self._wholes: dict[int, nn.Parameter] = {}
        """Those that this rank owns, by the id of their rows; without memory between steps."""
        self.named: list[tuple[str, Group, nn.Parameter]] = []
        for group, parameters in of_groups:
            group["params"] = []
            for parameter in parameters:
                if self._owners[id(parameter)] == self._group.rank():
                    whole = nn.Parameter(parameter.to_local().new_empty(parameter.shape))
                    whole.untyped_storage().resize_(0)
                    self._wholes[id(parameter)] = whole
                    self.named.append((names[id(parameter)], group, whole))
                    group["params"].append(whole)
        optimizer.register_step_pre_hook(self._gather)
        optimizer.register_step_post_hook(self._send_back)

    @torch.no_grad()
    def _gather(self, *_: Any) -> None:
        trained = [parameter for parameter in self._rows if parameter.grad is not None]
        for alike in _by_dtype(trained):
            for parameter, value in self._to_owners(alike, [parameter.to_local() for parameter in alike]):
                whole = self._wholes[id(parameter)]
                whole.untyped_storage().resize_(value.nbytes)
                whole.copy_(value)
            gradients: list[Any] = [parameter.grad for parameter in alike]
            for parameter, value in self._to_owners(alike, [gradient.to_local() for gradient in gradients]):
                self._wholes[id(parameter)].grad = value

    @torch.no_grad()
    def _send_back(self, *_: Any) -> None:
        trained = [parameter for parameter in self._rows if parameter.grad is not None]
        for alike in _by_dtype(trained):
            self._to_holders(alike)
        for whole in self._wholes.values():
            whole.grad = None
            whole.untyped_storage().resize_(0)

    def _to_owners(self, rows: list[DTensor], values: list[torch.Tensor]) -> list[tuple[DTensor, torch.Tensor]]:
        """Give the whole values of the parameters that this rank owns; `values`: its rows of each."""
        ranks = range(self._group.size())
        sent = [[v.flatten() for p, v in zip(rows, values, strict=True) if self._owners[id(p)] == r] for r in ranks]
        own = [parameter for parameter in rows if self._owners[id(parameter)] == self._group.rank()]
        sizes = [[_num_elements(parameter, rank) for parameter in own] for rank in ranks]
        received = self._exchange(sent, [sum(of_rank) for of_rank in sizes], values[0])
        parts = [of_rank.split(own_sizes) for of_rank, own_sizes in zip(received, sizes, strict=True)]
        return [(p, torch.cat([of_rank[n] for of_rank in parts]).view(p.shape)) for n, p in enumerate(own)]

    def _to_holders(self, rows: list[DTensor]) -> None:
        """Set this rank's rows of each parameter from the whole ones of their owners."""
        ranks = range(self._group.size())
        own = [parameter for parameter in rows if self._owners[id(parameter)] == self._group.rank()]
        shards = [self._wholes[id(p)].detach().flatten().split([_num_elements(p, rank) for rank in ranks]) for p in own]
        of_owners = [[parameter for parameter in rows if self._owners[id(parameter)] == rank] for rank in ranks]
        sizes = [[parameter.to_local().numel() for parameter in owned] for owned in of_owners]
        sent = [[of_ranks[rank] for of_ranks in shards] for rank in ranks]
        received = self._exchange(sent, [sum(owned) for owned in sizes], rows[0].to_local())
        for owned, values, own_sizes in zip(of_owners, received, sizes, strict=True):
            for parameter, value in zip(owned, values.split(own_sizes), strict=True):
                local = parameter.to_local()
                local.copy_(value.view(local.shape))

    def _exchange(
        self, sent: list[list[torch.Tensor]], num_received: list[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Send tensors to each rank, and give what each rank has sent, flat."""
        flat = torch.cat([like.new_empty(0), *(tensor for of_rank in sent for tensor in of_rank)])
        num_sent = [sum(tensor.numel() for tensor in of_rank) for of_rank in sent]
        received = like.new_empty(sum(num_received))
        dist.all_to_all_single(received, flat, num_received, num_sent, group=self._group)
        return received.split(num_received)


def first_element(parameter: DTensor, rank: int) -> int:
    """Give where a rank's rows begin in the whole: torch.chunk gives each equally many, the last ones fewer or none."""
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    return min(rank * -(-num_rows // mesh.size(mesh.ndim - 1)), num_rows) * math.prod(parameter.shape[1:])


def _num_elements(parameter: DTensor, rank: int) -> int:
    return first_element(parameter, rank + 1) - first_element(parameter, rank)


def _assign_owners(sizes: list[int], num_ranks: int) -> list[int]:
    """Give each parameter an owner, so that all own about as many elements: the largest first, to who has least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def _by_dtype(parameters: list[DTensor]) -> Iterator[list[DTensor]]:
    """By type, in one order on all ranks: a message has one."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        yield [parameter for parameter in parameters if parameter.dtype == dtype]
