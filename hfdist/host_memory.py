"""How much memory a process of this machine may hold: what is free, limits of cgroups, and its own. Loads no torch."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from hfdist.cgroup import find_groups, read_group_file, read_group_number


class CgroupMemory(NamedTuple):
    """The memory of a cgroup that has a limit."""

    limit_bytes: int
    used_bytes: int
    """Bytes that its processes use, the page cache of files that they have read included."""
    inactive_file_bytes: int
    """The part of `used_bytes` that is page cache the kernel gives back first."""
    kills: int
    """How many of its processes were killed for memory."""

    @property
    def free_bytes(self) -> int:
        """Bytes that its processes may still take."""
        return max(self.limit_bytes - max(self.used_bytes - self.inactive_file_bytes, 0), 0)


def usable_bytes(processes: int = 1) -> float:
    """Give the bytes that each of so many processes like this one may hold here, itself included."""
    own = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available / processes]
    group = cgroup_memory()
    if group is not None:
        free.append(group.free_bytes / processes)
    for kind, held in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, getattr(own, "data", own.rss))):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            free.append(max(most - held, 0))
    return own.rss + min(free)


def cgroup_memory() -> CgroupMemory | None:
    """Read the memory of the cgroup that leaves this process the least; None: it is in none with a limit."""
    found = [memory for group in find_groups("memory") if (memory := _read(group)) is not None]
    return min(found, key=lambda memory: memory.free_bytes, default=None)


def _read(group: Path) -> CgroupMemory | None:
    limit = read_group_number(group, "memory.max", "memory.limit_in_bytes")
    if limit is None:
        return None
    return CgroupMemory(
        limit_bytes=limit,
        used_bytes=read_group_number(group, "memory.current", "memory.usage_in_bytes") or 0,
        # Version 1 has the group alone in `inactive_file`, beside a usage of its children, too.
        inactive_file_bytes=_read_counter(group, ("total_inactive_file", "inactive_file"), "memory.stat"),
        kills=_read_counter(group, ("oom_kill",), "memory.events", "memory.oom_control"),
    )


def _read_counter(group: Path, keys: Sequence[str], *names: str) -> int:
    """Read the first of `keys` that a file with a counter on each line has; 0: none is there."""
    lines = (read_group_file(group, *names) or "").splitlines()
    counters = dict(line.partition(" ")[::2] for line in lines)
    value = next((counters[key] for key in keys if key in counters), "")
    return int(value) if value.isdecimal() else 0
