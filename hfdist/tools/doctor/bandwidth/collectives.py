"""The times of each collective at each size in the default process group, whose ranks all measure together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from hfdist.collectives import all_gather_single, reduce_scatter_single
from hfdist.tools.doctor.bandwidth.figures import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    KINDS,
    POINT_TO_POINT,
    REDUCE_SCATTER,
    Figure,
)

_NUM_ROUNDS = 5
_ROUND_SECONDS = 0.03
"""Seconds of a round of one collective: a short call is repeated in it and timed as a mean."""
_MOST_CALLS = 50
"""Most calls in a round."""
_ITEM_BYTES = 4
_LONG_SECONDS = 2.0
"""After a call that takes longer, larger sizes are left out: the link is known by then."""


@dataclass
class _Case:
    """A collective of one size, with its times so far."""

    kind: str
    size_bytes: int
    call: Callable[[], object]
    num_calls: int
    """Number of calls in a round."""
    runs_as: str
    """The backend's own name of the call."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a call, by round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of a call, by round."""


class _CallTime(NamedTuple):
    """The mean time of some calls in a row."""

    seconds: float
    cpu_seconds: float


def sizes_up_to(largest_bytes: int) -> list[int]:
    """Give the sizes to measure, in bytes: 1 KiB, each next one 16 times as large, and the largest."""
    sizes = [size for power in range(10, 41, 4) if (size := 1 << power) < largest_bytes]
    return [*sizes, largest_bytes]


def measure(group: str, sizes: Sequence[int], device: torch.device) -> list[Figure]:
    """Give the figures of this rank. A collective over the default process group.

    Rounds of all collectives follow each other, so that a disturbance of seconds does not decide about one of them.
    """
    cases = list(_warmed_up(sizes, device))
    for _ in range(_NUM_ROUNDS):
        for case in cases:
            time_of_call = _time(case.call, case.num_calls, device)
            case.seconds.append(time_of_call.seconds)
            case.cpu_seconds.append(time_of_call.cpu_seconds)
    _take_slowest_rank(cases, device)
    return [
        Figure(
            group=group,
            kind=case.kind,
            num_ranks=dist.get_world_size(),
            size_bytes=case.size_bytes,
            seconds=statistics.median(case.seconds),
            low_seconds=min(case.seconds),
            high_seconds=max(case.seconds),
            cpu_seconds=statistics.median(case.cpu_seconds),
            runs_as=case.runs_as,
        )
        for case in cases
    ]


def _take_slowest_rank(cases: Sequence[_Case], device: torch.device) -> None:
    """Replace this rank's times by those of the slowest rank, round by round. A collective.

    A rank that is late in a round finds the bytes of the others in its socket: its own time says too little.
    """
    seconds = torch.tensor([case.seconds for case in cases], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    for case, of_rounds in zip(cases, seconds.tolist(), strict=True):
        case.seconds = of_rounds


def _warmed_up(sizes: Sequence[int], device: torch.device) -> Iterator[_Case]:
    """Make the cases; each is called once before, which connects the ranks, and tells how often a round calls it."""
    first, second = (torch.ones(max(sizes) // _ITEM_BYTES + dist.get_world_size(), device=device) for _ in range(2))
    for kind in KINDS:
        runs_as = ""
        for size in sizes:
            num_ranks = dist.get_world_size()
            # Rounded down to shares of the same length.
            count = max(num_ranks, size // _ITEM_BYTES // num_ranks * num_ranks)
            call = _make_call(kind, first[:count], second[:count])
            runs_as = runs_as or _name_of(call)
            seconds = torch.tensor(_time(call, 1, device).seconds, device=device)
            # All ranks must call it equally often in a round.
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            num_calls = min(max(int(_ROUND_SECONDS / float(seconds)), 1), _MOST_CALLS)
            yield _Case(kind, count * _ITEM_BYTES, call, num_calls, runs_as)
            if float(seconds) > _LONG_SECONDS:
                break


def _make_call(kind: str, whole: torch.Tensor, other: torch.Tensor) -> Callable[[], object]:
    """Give a function that makes one call of a collective, on two tensors of the same size."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    share = other[: len(other) // num_ranks]
    calls: dict[str, Callable[[], object]] = {
        # The maximum of ones is one: the numbers stay what they are, however often it is called.
        ALL_REDUCE: lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
        REDUCE_SCATTER: lambda: reduce_scatter_single(share, whole, dist.ReduceOp.MAX),
        ALL_GATHER: lambda: all_gather_single(whole, share),
        ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole),
        BROADCAST: lambda: dist.broadcast(whole, group_src=0),
        POINT_TO_POINT: lambda: _pass_on(whole, other, (rank + 1) % num_ranks, (rank - 1) % num_ranks),
    }
    return calls[kind]


def _pass_on(sent: torch.Tensor, received: torch.Tensor, to: int, by: int) -> None:
    """Send to the next rank and receive from the one before, as NCCL's test does."""
    ops = [dist.P2POp(dist.isend, sent, group_peer=to), dist.P2POp(dist.irecv, received, group_peer=by)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _time(call: Callable[[], object], num_calls: int, device: torch.device) -> _CallTime:
    """Give the mean time of some calls in a row, which begin when all ranks have come."""
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return _CallTime(seconds / num_calls, cpu_seconds / num_calls)


def _name_of(call: Callable[[], object]) -> str:
    """Give the backend's own name of what it does in a call, such as `gloo:all_reduce`, as the profiler sees it."""
    # Without this, the profiler (Kineto) announces each start on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile() as recorded:
        call()
    backend = f"{dist.get_backend()}:"
    names = dict.fromkeys(event.name for event in recorded.function_events or () if event.name.startswith(backend))
    return ", ".join(names)
