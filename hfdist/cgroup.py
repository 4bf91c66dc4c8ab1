"""Files of the control group of this process, as Linux shows them: version 2, or a controller of version 1."""

from __future__ import annotations

from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def read_group_file(name: str, old_name: str, controller: str) -> str | None:
    """Read a file of this process's group; None: there is none.

    Args:
        name: of the file in version 2.
        old_name: of the file in version 1.
        controller: whose file it is, such as "memory".
    """
    try:
        groups = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in groups:
        if controllers == "":
            # Inside a container its own group is at the top.
            places = [Path(f"{_ROOT}{path}") / name, _ROOT / name]
        elif controller in controllers.split(","):
            root = _ROOT / controller
            places = [Path(f"{root}{path}") / old_name, root / old_name]
        else:
            continue
        for place in places:
            try:
                return place.read_text().strip()
            except OSError:
                continue
    return None


def read_group_limit(name: str, old_name: str, controller: str) -> int | None:
    """Read a number of this process's group; None: there is none, or no limit."""
    text = read_group_file(name, old_name, controller)
    return int(text) if text is not None and text.isdecimal() and int(text) < 1 << 60 else None
