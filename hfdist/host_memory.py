"""How much memory a process of this machine may hold: what is free, a cgroup's limit, and its own. Loads no torch."""

from __future__ import annotations

import resource
from typing import NamedTuple

import psutil

from hfdist.cgroup import read_group_file, read_group_limit


class GroupMemory(NamedTuple):
    """The memory of this process's cgroup, in bytes."""

    limit: int
    used: int
    """What files have been read counts, too, but gives way."""
    of_files: int
    """The part of `used` that is files which nobody has used of late."""
    kills: int
    """How many of its processes were killed for memory."""


def usable_bytes(processes: int = 1) -> float:
    """Give what each of so many processes like this one may hold here, itself included."""
    own = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available / processes]
    group = group_memory()
    if group is not None:
        free.append(max(group.limit - max(group.used - group.of_files, 0), 0) / processes)
    for kind, held in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, getattr(own, "data", own.rss))):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            free.append(max(most - held, 0))
    return own.rss + min(free)


def group_memory() -> GroupMemory | None:
    """Read the memory of this process's cgroup; None: it has no limit."""
    limit = read_group_limit("memory.max", "memory.limit_in_bytes", "memory")
    if limit is None:
        return None
    used = read_group_limit("memory.current", "memory.usage_in_bytes", "memory") or 0
    of_files = _counted("memory.stat", "memory.stat", "inactive_file")
    return GroupMemory(limit, used, of_files, _counted("memory.events", "memory.oom_control", "oom_kill"))


def _counted(name: str, old_name: str, key: str) -> int:
    """Give a number of a file with one on each line; 0: it is not there."""
    numbers = dict(line.partition(" ")[::2] for line in (read_group_file(name, old_name, "memory") or "").splitlines())
    value = numbers.get(key, "")
    return int(value) if value.isdecimal() else 0
