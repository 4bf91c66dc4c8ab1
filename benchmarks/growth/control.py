"""What ranks cost each other beside the training: real ranks of faked machines, and rank 0's watch, faked messages."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.growth.traffic import socket_bytes
from hfdist.collectives import rank
from hfdist.control_group import ControlGroup
from hfdist.messages.message import write_message
from hfdist.watch.heartbeat import Heartbeat, PeerState
from hfdist.watch.store import Store, read_report
from hfdist.watch.tree import Below, Digest, find_parents

MACHINE_RANKS = 8
_REDUCTIONS = 50
_SECONDS = 5
"""Seconds of the watch that are played."""


@dataclass(kw_only=True)
class GroupCosts:
    """Costs of a control group on one rank."""

    descriptors: int
    """Files and connections that are open for it once it was used in each way."""
    make_cpu_seconds: float
    reduce_cpu_seconds: float
    """CPU seconds of the flags of a step."""
    reduce_bytes: float
    """Bytes that are sent for them."""
    gather_cpu_seconds: float


def measure_group(machine_ranks: int) -> GroupCosts:
    """Make a group of ranks with so many on a machine, and use it."""
    platform.node = lambda: f"machine-{rank() // machine_ranks}"
    before, began = _descriptors(), time.process_time()
    group = ControlGroup()
    made = time.process_time()
    group.swap([b""] * dist.get_world_size())
    group.gather(b"")
    group.begin_largest([0, 1])()
    sent_bytes, begin = socket_bytes(), time.process_time()
    for _ in range(_REDUCTIONS):
        group.begin_largest([0, 1])()
    reduced, reduced_bytes = time.process_time(), socket_bytes() - sent_bytes
    for _ in range(_REDUCTIONS):
        group.gather(b"x" * 100)
    costs = GroupCosts(
        descriptors=_descriptors() - before,
        make_cpu_seconds=made - began,
        reduce_cpu_seconds=(reduced - begin) / _REDUCTIONS,
        reduce_bytes=reduced_bytes / _REDUCTIONS,
        gather_cpu_seconds=(time.process_time() - reduced) / _REDUCTIONS,
    )
    # Who ends first closes the connections of the others.
    dist.barrier()
    return costs


@dataclass(kw_only=True)
class WatchCosts:
    """Costs of the watch on rank 0."""

    messages: int
    """Heartbeats that come in a second."""
    received_bytes: int
    """Their bytes."""
    cpu_seconds: float
    """CPU seconds of a second."""


def measure_watch(num_ranks: int, machine_ranks: int) -> WatchCosts:
    """Play some seconds in which all is well; transport is left out, and ranks below say what they would say.

    Where one machine has all ranks, rank 0 hears each of them.
    """
    machines = [range(begin, begin + machine_ranks) for begin in range(0, num_ranks, machine_ranks)]
    parents = find_parents(machines)
    known = [Heartbeat(number=0, host="a-machine", pid=1)] * num_ranks
    below = Below(0, known, parents, 0.0)
    speakers = [number for number, parent in parents.items() if parent == 0]
    leaders = set(parents.values())
    of_speaker = {
        number: Below(number, known, parents, 0.0).digest(0.0, 1.0) if number in leaders else Digest()
        for number in speakers
    }
    store = Store(0, num_ranks, below, None, None)
    cpu_seconds, received_bytes = 0.0, 0
    for second in range(_SECONDS):
        lines = list(_lines(of_speaker, second))
        received_bytes += sum(len(line) for _, line in lines)
        begin = time.process_time()
        for number, line in lines:
            below.hear(number, *read_report(line, len(line)), second)
        store.exchange(Heartbeat(number=second), None, 1.0)
        for _ in range(2):
            own = Digest.of(PeerState(Heartbeat(number=second)), 1.0)
            assert not Digest.merged([own, below.digest(second, 1.0)]).is_suspect(60.0)
        cpu_seconds += time.process_time() - begin
    return WatchCosts(
        messages=len(speakers), received_bytes=received_bytes // _SECONDS, cpu_seconds=cpu_seconds / _SECONDS
    )


def _lines(of_speaker: dict[int, Digest], second: int) -> Iterator[tuple[int, bytes]]:
    for number, digest in of_speaker.items():
        beat = Heartbeat(
            number=second + 1, host="a-machine", marks=9000, mark="a batch that was read", step=4000, pid=1
        )
        yield number, write_message({"beat": beat, "digest": digest, "each": []})


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
