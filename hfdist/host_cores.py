"""How many cores of this machine a process may use: its affinity, and limits of its cgroups. Loads no torch."""

from __future__ import annotations

import os

from hfdist.cgroup import find_groups, read_group_file


def usable_cores() -> int:
    """Give how many cores this process and its children may use together, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in find_groups("cpu"):
        # Version 2 has both in one file: "150000 100000", or "max 100000".
        quota, _, period = (read_group_file(group, "cpu.max", "cpu.cfs_quota_us") or "").partition(" ")
        period = period or read_group_file(group, "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            cores = min(cores, round(int(quota) / int(period)))
    return max(1, cores)
