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
from torch.utils._python_dispatch import TorchDispatchMode

_TCP_INFO_BYTES, _NOT_SENT, _BYTES_SENT = 256, 144, 200
"""Size of the kernel's `struct tcp_info`, and where `tcpi_notsent_bytes` and `tcpi_bytes_sent` are in it.

`tcpi_bytes_retrans` follows the latter.
"""


class CountCollectives(TorchDispatchMode):
    """While it is entered: bytes that this rank sends, by kind of collective, if each were run as a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operator."""
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            kind = name.strip("_").removesuffix("_base")
            group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
            num_ranks = dist.ProcessGroup.unbox(group).size()
            largest_bytes = max((tensor.nbytes for tensor in _tensors(args)), default=0)
            if name == "allgather_":
                largest_bytes *= num_ranks  # a list of shares; the others have the whole in one tensor
            self.sent_bytes[kind] += ring_bytes(kind, largest_bytes, num_ranks)
            self.calls[kind] += 1
        elif func.namespace == "_c10d_functional" and isinstance(args[-1], str):
            kind = func.name().partition("::")[2]
            num_ranks = distributed_c10d._resolve_process_group(args[-1]).size()
            whole_bytes = args[0].nbytes * (num_ranks if kind.startswith("all_gather") else 1)
            self.sent_bytes[kind] += ring_bytes(kind, whole_bytes, num_ranks)
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def ring_bytes(kind: str, whole_bytes: int, num_ranks: int) -> int:
    """What each rank of a ring sends on average.

    Args:
        kind: of collective, as in the name of c10d's operator.
        whole_bytes: of what all ranks have together at the end (a gather), or each at the beginning (a reduction).
        num_ranks: of the group.
    """
    share = (num_ranks - 1) / num_ranks
    factors = {"allreduce": 2 * share, "send": 1.0, "recv": 0.0, "barrier": 0.0}
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
