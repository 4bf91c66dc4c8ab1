"""The hardware of a plan: by name, or the device at hand; a machine without a GPU is measured in about two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from hfdist.config.hardware import CPU, Hardware, Tflops, match_device, read_hardware
from hfdist.energy.estimates import WATTS_PER_CORE
from hfdist.errors import ConfigError
from hfdist.host_cores import usable_cores
from hfdist.testing import run_ranks

_GIB = 2.0**30
_WIDTHS = (256, 768)
"""Widths of the matrices that are multiplied, as in small models; the larger one is used if the smaller is quick."""
_COPIED_BYTES = 32 * 2**20
"""Bytes that are copied: more than caches hold."""
_SENT_BYTES = 4 * 2**20
_NUM_SMALL = 100
"""Number of operations on a few numbers, forward and backward."""
_TURN_SECONDS = 0.1
_MOST_RANKS = 4
"""The most ranks that measure at once; more of them share the cores alike."""


def find_hardware(name: str | None = None, *, processes: int = 1, own: Path | None = None) -> Hardware:
    """Find the hardware of a plan's ranks.

    Args:
        name: name or path of a file as those of conf/hardware/; `cpu`: measure this machine; None: the device at hand.
        processes: processes of the run; on a CPU they share the machine.
        own: the user's own folder of configs.

    Raises:
        ConfigError: there is no such hardware, a file that is wrong, or a GPU at hand that no file describes.
    """
    if name is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found = match_device(device.name, own)
        if found is None:
            what, hint = "no file describes this GPU", "plan.hardware=FILE.yaml, with the keys of conf/hardware/l4.yaml"
            raise ConfigError(what, where="plan.hardware", found=device.name, hint=hint)
        return replace(found, memory_gib=device.total_memory / _GIB)
    if name is None or name == CPU:
        return measure_cpu(processes)
    return read_hardware(name, own)


class _Speeds(NamedTuple):
    """Speeds of one rank of this machine, while as many others compute."""

    fp32_flops: float
    """Operations a second of matrix products."""
    bf16_flops: float
    moved_bytes: float
    """Bytes a second that are read and written."""
    operation_seconds: float
    """Seconds of an operation on a few numbers."""
    sent_bytes: float
    """Bytes a second to another rank."""
    message_seconds: float
    """Seconds of a message of a few numbers."""


def measure_cpu(processes: int = 1) -> Hardware:
    """Measure the speed of each of `processes` processes of one thread that run on this machine at the same time."""
    num_ranks = min(processes, _MOST_RANKS)
    of_ranks = run_ranks(_measure, num_ranks, timeout_seconds=60)
    speeds = _Speeds(*(median(values) for values in zip(*of_ranks, strict=True)))
    num_cores = usable_cores()
    # Ranks were measured by their own CPU seconds, and links by the clock.
    share = min(1.0, num_cores / processes)
    of_links = min(1.0, max(num_ranks, num_cores) / processes)
    half = speeds.bf16_flops * share / 1e12
    link_gb_per_second, link_latency_us = speeds.sent_bytes * of_links / 1e9, speeds.message_seconds / of_links * 1e6
    return Hardware(
        name=CPU,
        memory_gib=psutil.virtual_memory().total / _GIB / processes,
        tflops=Tflops(fp32=speeds.fp32_flops * share / 1e12, bf16=half, fp16=half),
        memory_gb_per_second=speeds.moved_bytes * share / 1e9,
        link_gb_per_second=link_gb_per_second,
        link_latency_us=link_latency_us,
        # The network is not measured.
        network_gb_per_second=link_gb_per_second,
        network_latency_us=link_latency_us,
        kernel_us=speeds.operation_seconds / share * 1e6,
        devices_per_machine=processes,
        watts=WATTS_PER_CORE * num_cores / processes,
        core_share=share,
    )


def _measure() -> _Speeds:
    """Measure on each rank."""
    fp32, bf16 = (_operations_per_second(kind) for kind in (torch.float32, torch.bfloat16))
    numbers = torch.ones(_COPIED_BYTES // 4)
    bandwidth = 2 * _COPIED_BYTES / _seconds(lambda: torch.neg(numbers, out=numbers))
    small = torch.ones(16, requires_grad=True)

    def chain() -> None:
        value = small
        for _ in range(_NUM_SMALL):
            value = value * 1.5
        value.sum().backward()

    # Each operation has a forward and a backward.
    kernel = _seconds(chain) / (2 * _NUM_SMALL)
    if dist.get_world_size() == 1:
        return _Speeds(fp32, bf16, bandwidth, kernel, sent_bytes=bandwidth, message_seconds=kernel)
    few, many = torch.ones(16), torch.ones(_SENT_BYTES // 4)
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    # A collective needs the same number of rounds on all ranks.
    latency = _seconds(lambda: dist.all_reduce(few), num_rounds=30)
    link = 2 * share * _SENT_BYTES / _seconds(lambda: dist.all_reduce(many), num_rounds=8)
    # The ring of gloo passes on so many messages, one after the other.
    num_messages = 2 * (dist.get_world_size() - 1)
    return _Speeds(fp32, bf16, bandwidth, kernel, sent_bytes=link, message_seconds=latency / num_messages)


def _operations_per_second(kind: torch.dtype) -> float:
    rate = 0.0
    for width in _WIDTHS:
        left, right = torch.ones(width, width, dtype=kind), torch.ones(width, width, dtype=kind)
        seconds = _seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        rate = 2 * width**3 / seconds
        if seconds > _TURN_SECONDS / 10:
            break
    return rate


def _seconds(action: Callable[[], object], *, num_rounds: int | None = None) -> float:
    """Give the median time of an action: CPU seconds over `_TURN_SECONDS`, or wall seconds over `num_rounds` rounds."""
    clock = time.process_time if num_rounds is None else time.perf_counter
    rounds: list[float] = []
    end = clock() + _TURN_SECONDS
    while len(rounds) < (num_rounds or 1) or (num_rounds is None and clock() < end):
        begin = clock()
        action()
        rounds.append(clock() - begin)
    # The first rounds warm up, and do not count.
    return median(rounds[len(rounds) // 4 :])
