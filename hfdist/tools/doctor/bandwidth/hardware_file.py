"""A file of hardware with links as they were measured, which `hfdist plan` reads like those of conf/hardware/."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import yaml

from hfdist.atomic_write import write_atomically
from hfdist.config.hardware import CPU
from hfdist.errors import ResourceError
from hfdist.planning.timing.hardware import find_hardware
from hfdist.tools.doctor.bandwidth.figures import BETWEEN, IN_MACHINE, Link


def write_hardware(path: Path, name: str | None, links: Mapping[str, Link], *, processes: int, is_cpu: bool) -> None:
    """Write a file of hardware: its links as they were measured, and all else as a known kind of hardware has it.

    Args:
        path: the file to write.
        name: name of the known hardware, which is a file of conf/hardware/ or a path; None: the device of this machine.
        links: links that were measured, by group of ranks.
        processes: number of processes in a machine.
        is_cpu: whether ranks computed on the CPU.

    Raises:
        ConfigError: there is no such hardware.
        ResourceError: the file cannot be written.
    """
    hardware = find_hardware(CPU if is_cpu and name is None else name, processes=processes)
    content = asdict(hardware)
    del content["name"]
    if is_cpu:
        content["devices"] = [CPU]
    content["devices_per_machine"] = max(processes, torch.cuda.device_count())
    for group, key in ((IN_MACHINE, "link"), (BETWEEN, "network")):
        if group in links:
            content[f"{key}_gb_per_second"] = links[group].gbs
            content[f"{key}_latency_us"] = 1e6 * links[group].latency_seconds
    measured = " and ".join(links)
    head = (
        f"# Links {measured} as `hfdist bandwidth` measured them on {time.strftime('%Y-%m-%d', time.gmtime())}, with "
        f"{processes} ranks in a machine.\n# All else: {hardware.name}. conf/hardware/h100_80gb.yaml has the keys.\n"
    )
    text = head + yaml.safe_dump(_rounded(content), sort_keys=False, default_flow_style=None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise ResourceError("the file cannot be written", where=str(path), found=error.strerror) from error


def _rounded(value: object) -> object:
    """Give a value with four digits in each number that is not whole, at any depth of its mappings."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
