"""Files of the control groups (cgroups) that this process is in: version 2, or a controller of version 1 of Linux.

A limit of a group holds for all groups in it, whose files do not repeat it: Slurm limits a job and a step, systemd a
slice, and the group of the process itself often has none.
"""

from __future__ import annotations

from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 writes 2**63 - 4096 in place of a limit."""


def find_groups(controller: str) -> list[Path]:
    """Give the folder of this process's group, and then of each group around it, for a controller such as "memory"."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in lines:
        if controllers == "" or controller in controllers.split(","):
            root = _ROOT / controller if controllers else _ROOT
            # In a container the path may be that of the host: then only the root is there.
            own = root / path.lstrip("/")
            found += [own, *(group for group in own.parents if group.is_relative_to(root))]
    return found


def read_group_file(group: Path, *names: str) -> str | None:
    """Read the first of these files that a group has, of which each version has its own; None: it has none of them."""
    for name in names:
        try:
            return (group / name).read_text().strip()
        except OSError:
            continue
    return None


def read_group_number(group: Path, *names: str) -> int | None:
    """Read a number as `read_group_file` does; None: there is none, or it stands for no limit."""
    text = read_group_file(group, *names) or ""
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def least_limit(controller: str, *names: str) -> int | None:
    """Give the lowest limit of all groups; None: none has one."""
    limits = (read_group_number(group, *names) for group in find_groups(controller))
    return min((limit for limit in limits if limit is not None), default=None)
