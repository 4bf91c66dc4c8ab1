"""How much memory a process of this machine may hold: what is free, a cgroup's limit, and its own. Loads no torch."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil


def usable_bytes(processes: int = 1) -> float:
    """Give what each of so many processes like this one may hold here, itself included."""
    own = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available / processes]
    limit = of_cgroup("memory.max", "memory.limit_in_bytes")
    if limit is not None:
        used = of_cgroup("memory.current", "memory.usage_in_bytes") or 0
        # What files have been read counts as used, but gives way.
        reclaimable = _of_files()
        free.append(max(limit - max(used - reclaimable, 0), 0) / processes)
    for kind, held in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, getattr(own, "data", own.rss))):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            free.append(max(most - held, 0))
    return own.rss + min(free)


def of_cgroup(name: str, old_name: str, controller: str = "memory") -> int | None:
    """Read a limit of this process's cgroup; None: there is none."""
    text = _read(name, old_name, controller)
    return int(text) if text is not None and text.isdecimal() and int(text) < 1 << 60 else None


def _of_files() -> int:
    """Give the bytes of files in the cgroup's memory that nobody has used of late."""
    for line in (_read("memory.stat", "memory.stat", "memory") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file" and value.isdecimal():
            return int(value)
    return 0


def _read(name: str, old_name: str, controller: str) -> str | None:
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in groups:
        if controllers == "":
            places = [Path(f"/sys/fs/cgroup{path}") / name, Path("/sys/fs/cgroup") / name]
        elif controller in controllers.split(","):
            root = Path(f"/sys/fs/cgroup/{controller}")
            places = [Path(f"{root}{path}") / old_name, root / old_name]
        else:
            continue
        for place in places:
            try:
                return place.read_text().strip()
            except OSError:
                continue
    return None
