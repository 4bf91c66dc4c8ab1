"""The machines of a plan: devices, the memory that a process may use, and factors of speed from past runs."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch

from hfdist.atomic_write import write_atomically
from hfdist.config.data import cache_dir
from hfdist.config.hardware import Hardware, Tflops
from hfdist.config.plan import PlanConfig
from hfdist.config.run import RunConfig
from hfdist.host_cores import usable_cores
from hfdist.host_memory import usable_bytes
from hfdist.planning.searching.evaluate import Machines
from hfdist.planning.timing.calibration import calibrate, read_steps
from hfdist.planning.timing.hardware import find_hardware, measure_cpu

STEPS = "timed_steps.jsonl"
"""File in hfdist's cache folder with a line for each run, from which later plans learn."""
_MOST_STEPS = 50
"""Number of lines of `STEPS` that count, the last ones: machines change."""
_GIB = 2**30
_MORE_IN_A_RUN = 96 * 2**20
"""Bytes of the trainer's libraries and the tokenizer, which a plan does not import: measured on Linux."""
_RUNTIME_OF_GPU = 1.2 * _GIB
"""Bytes of context, kernels and workspaces of CUDA, and of NCCL's buffers. Not measured by hfdist."""


def find_machines(config: RunConfig, asked: PlanConfig, hardware: Hardware | None, processes: int) -> Machines:
    """Find the device and the memory of each process: as asked, as the hardware has them, or as they are free here.

    Args:
        config: config of the run.
        asked: the plan's keys.
        hardware: the hardware that is asked for by name; None: the hardware at hand.
        processes: number of processes.
    """
    per_machine = asked.per_machine
    if hardware is None and asked.hardware is None and torch.cuda.is_available():
        hardware = find_hardware()
    found = measure_cpu_once(cache_dir(config.data), per_machine or processes) if hardware is None else hardware
    if per_machine is not None:
        found = replace(found, devices_per_machine=per_machine)
    runtime = psutil.Process().memory_info().rss + _MORE_IN_A_RUN if found.is_cpu else _RUNTIME_OF_GPU
    if asked.memory_gib is not None:
        usable = asked.memory_gib * _GIB
    elif found.is_cpu:
        usable = usable_bytes(min(processes, found.devices_per_machine))
    else:
        usable = found.memory_bytes
    return Machines(
        hardware=found,
        usable_bytes=usable,
        runtime_bytes=runtime,
        factors=calibrate(read_steps(cache_dir(config.data) / STEPS, found.name)[-_MOST_STEPS:], found),
    )


def measure_cpu_once(folder: Path, processes: int) -> Hardware:
    """Measure the CPU as `processes` processes share it, once: past runs were timed against the same figures."""
    # A job or a container may have other cores of the same machine.
    words = f"{platform.node()} {usable_cores()} {processes} {torch.__version__}"
    path = folder / f"cpu-{hashlib.blake2b(words.encode(), digest_size=8).hexdigest()}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(path.read_bytes())
        return Hardware(**values | {"tflops": Tflops(**values["tflops"])})
    measured = measure_cpu(processes)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(measured)).encode(), is_durable=False)
    return measured
