"""Bytes that a rank sends, counted in two ways that know nothing of each other: at the collectives, and at the sockets.

The first counts what a ring would send for each collective that any library starts, DDP's C++ and DeepSpeed among them.
The second is what gloo has really sent.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_TCP_INFO_BYTES, _NOT_SENT, _BYTES_SENT = 256, 144, 200
"""Size of the kernel's `struct tcp_info`, and where `tcpi_notsent_bytes` and `tcpi_bytes_sent` are in it.

`tcpi_bytes_retrans` follows the latter.
"""


class CountCollectives(TorchDispatchMode):
    """While it is entered: bytes that this rank sends, by group and kind of collective, if each were run as a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.of_groups: Counter[tuple[str, str]] = Counter()
        """By torch's name of the group, and by kind as in `ring_bytes`."""

    @property
    def sent_bytes(self) -> Counter[str]:
        """Of all groups together, by kind."""
        sent: Counter[str] = Counter()
        for (_, kind), num_bytes in self.of_groups.items():
            sent[kind] += num_bytes
        return sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            # What it sends it does by operators of plain tensors, which come here again.
            return NotImplemented
        name = func.name().partition("::")[2].strip("_").removesuffix("_base")
        if func.namespace == "c10d":
            handle = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(handle)
            largest_bytes = max((tensor.nbytes for tensor in _tensors(args)), default=0)
            if func.name() == "c10d::allgather_":
                largest_bytes *= group.size()  # a list of shares; the others have the whole in one tensor
            self._count(group, name, largest_bytes)
        elif func.namespace == "_c10d_functional" and isinstance(args[-1], str):
            group = distributed_c10d._resolve_process_group(args[-1])
            self._count(group, name, args[0].nbytes * (group.size() if name.startswith("all_gather") else 1))
        return func(*args, **(kwargs or {}))

    def _count(self, group: dist.ProcessGroup, name: str, whole_bytes: int) -> None:
        kind = _KINDS.get(name, name)
        self.of_groups[group.group_name, kind] += ring_bytes(kind, whole_bytes, group.size())


_KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all_single": "all-to-all",
}
"""Of c10d's operators and of the functional ones, by their names."""


def ring_bytes(kind: str, whole_bytes: float, num_ranks: int) -> int:
    """What each rank of a ring sends on average.

    Args:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `send`, `recv`, `barrier`, or another.
        whole_bytes: of what all ranks have together at the end (a gather), or each at the beginning (the others).
        num_ranks: of the group.
    """
    share = (num_ranks - 1) / num_ranks
    factors = {"all-reduce": 2 * share, "send": 1.0, "recv": 0.0, "barrier": 0.0}
    return round(factors.get(kind, share) * whole_bytes)


def socket_bytes() -> int:
    """What this process has written to all its open TCP sockets, by the kernel's count: no headers, each byte once."""
    return sum(map(_sent_bytes, list(_sockets())))


def _sockets() -> Iterator[int]:
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if os.readlink(entry).startswith("socket:"):
                yield int(entry.name)
        except FileNotFoundError:
            continue


def _sent_bytes(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return 0
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        sent, sent_again = struct.unpack_from("<QQ", info, _BYTES_SENT)
        (waiting,) = struct.unpack_from("<I", info, _NOT_SENT)
        # A busy machine acknowledges late, and the kernel then sends again, even on the loopback: no rank asked for it.
        # A collective is over for a rank once the kernel has its bytes: a peer that reads late leaves some unsent.
        return int(sent - sent_again + waiting)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
