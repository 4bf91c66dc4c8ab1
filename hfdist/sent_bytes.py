"""Counts what this rank sends in the collectives of any library, DDP's C++ and DeepSpeed among them.

Each is counted as a ring, or a pairwise exchange, would send it. What a backend does in truth may differ: gloo's
reduce-scatter sends what an all-reduce does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.library import _scoped_library

from hfdist.topology import Topology

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
BROADCAST, SEND = "broadcast", "send"

_KEY = torch._C.DispatchKey.BackendSelect
"""The only dispatch key above those of devices that no guard of autograd or of inference mode leaves out."""


class _Operator(NamedTuple):
    kind: str
    whole: int
    """The argument that has all that is reduced, gathered or exchanged."""
    group: int
    """The argument that is the process group."""


_OPERATORS = {
    "allreduce_": _Operator(ALL_REDUCE, 0, 1),
    "allreduce_coalesced_": _Operator(ALL_REDUCE, 0, 1),
    "allgather_": _Operator(ALL_GATHER, 0, 2),
    "allgather_coalesced_": _Operator(ALL_GATHER, 0, 2),
    "allgather_into_tensor_coalesced_": _Operator(ALL_GATHER, 0, 2),
    "_allgather_base_": _Operator(ALL_GATHER, 0, 2),
    "reduce_scatter_": _Operator(REDUCE_SCATTER, 1, 2),
    "reduce_scatter_tensor_coalesced_": _Operator(REDUCE_SCATTER, 1, 2),
    "_reduce_scatter_base_": _Operator(REDUCE_SCATTER, 1, 2),
    "alltoall_": _Operator(ALL_TO_ALL, 1, 2),
    "alltoall_base_": _Operator(ALL_TO_ALL, 1, 2),
    "broadcast_": _Operator(BROADCAST, 0, 1),
    "reduce_": _Operator("reduce", 0, 1),
    "gather_": _Operator("gather", 1, 2),
    "scatter_": _Operator("scatter", 0, 2),
    "send": _Operator(SEND, 0, 1),
}
"""All operators of `torch.ops.c10d` that send (torch 2.13); no document lists them. Functional collectives use them."""


class Channel(NamedTuple):
    """Where something is sent, and how."""

    ranks: tuple[int, ...]
    """All of a group, this rank included; of a message its two ends."""
    kind: str


class SentBytes:
    """While it is entered: what this rank sends, by channel. One at a time in a process.

    No other thread may send while it is entered or left: torch frees a kernel that another thread is about to run. A
    collective costs 0.1 ms more meanwhile, and nothing otherwise.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[Channel] = Counter()
        self.calls: Counter[Channel] = Counter()
        self._ranks: dict[dist.ProcessGroup, tuple[int, ...]] = {}
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        library = self._entered.enter_context(_scoped_library("c10d", "IMPL"))
        for name, known in _OPERATORS.items():
            overload = getattr(torch.ops.c10d, name).default
            library.impl(name, partial(self._call, overload, known), _KEY.name, with_keyset=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def _call(
        self,
        overload: Any,
        known: _Operator,
        keys: torch.DispatchKeySet,
        *args: Any,
        **kwargs: object,
    ) -> object:
        """Count a collective, and do it."""
        group = dist.ProcessGroup.unbox(args[known.group])
        ranks = self._ranks.get(group)
        if ranks is None:
            ranks = self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return overload.redispatch(keys.remove(_KEY), *args, **kwargs)
        whole_bytes = sum(tensor.nbytes for tensor in _tensors(args[known.whole]))
        if known.kind == SEND:
            channel = Channel(tuple(sorted((ranks[group.rank()], ranks[args[2]]))), SEND)
        else:
            channel = Channel(ranks, known.kind)
        self.calls[channel] += 1
        self.num_bytes[channel] += ring_bytes(known.kind, whole_bytes, len(ranks))
        return overload.redispatch(keys.remove(_KEY), *args, **kwargs)


def axis_of(channel: Channel, topology: Topology) -> str:
    """Name the axis of the mesh along which something is sent.

    What ranks send that have other tokens is `data`, or with replicas `shard` within one, `replicate` between two, and
    `data` over all; the ranks that share a sequence take part in it, too. Small values that all ranks send each other,
    along whatever axes there are, have the names of all of them.
    """
    places = [topology.coordinates(rank) for rank in channel.ranks]
    differing = {axis for axis in topology.mesh_shape if len({place[axis] for place in places}) > 1}
    if differing == {"expert"} and channel.kind == ALL_TO_ALL:
        return "expert"
    if differing == {"context"} and channel.kind != ALL_REDUCE:
        return "context"
    names = []
    if differing & {"pipeline"}:
        names.append("pipeline")
    if differing - {"pipeline", "tensor"}:
        is_within_replicas = bool({"shard", "expert_shard", "expert"} & differing)
        is_between_replicas = "replicate" in differing
        if topology.replicate == 1 or is_within_replicas == is_between_replicas:
            names.append("data")
        else:
            names.append("shard" if is_within_replicas else "replicate")
    if differing & {"tensor"}:
        names.append("tensor")
    return " x ".join(names)


def ring_bytes(kind: str, whole_bytes: float, num_ranks: int) -> int:
    """Give what each rank of a ring sends on average.

    Args:
        kind: the collective, such as `ALL_REDUCE`, or `SEND`.
        whole_bytes: bytes that all ranks have together at the end (a gather), or each at the beginning (the others).
        num_ranks: number of ranks of the group.
    """
    share = (num_ranks - 1) / num_ranks
    return round({ALL_REDUCE: 2 * share, SEND: 1.0}.get(kind, share) * whole_bytes)


def _tensors(values: torch.Tensor | Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors(value)
