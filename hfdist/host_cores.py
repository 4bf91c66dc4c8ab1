"""How many cores of this machine a process may use: its affinity, and a cgroup's limit. Loads no torch."""

from __future__ import annotations

import os

from hfdist.cgroup import read_group_file


def usable_cores() -> int:
    """Give how many cores this process and its children may use together, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Version 2 has both in one file: "150000 100000", or "max 100000".
    quota, _, period = (read_group_file("cpu.max", "cpu.cfs_quota_us", "cpu") or "").partition(" ")
    period = period or read_group_file("cpu.max", "cpu.cfs_period_us", "cpu") or ""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return cores
    return max(1, min(cores, round(int(quota) / int(period))))
