"""How many cores of this machine a process may use: its affinity, and a cgroup's limit. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Give how many cores this process and its children may use together, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
