"""What is said when a process that reads data ahead is killed: which one, what it was for, and how much memory it had.

torch tells of it wherever the rank happens to be: its handler of SIGCHLD raises a RuntimeError there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from hfdist.errors import ResourceError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


class Vitals:
    """What loader processes note of themselves, where their rank can read it after their end. Make it before the fork.

    Args:
        num_workers: how many there are.
        task: says what a worker is for, by its number.
    """

    def __init__(self, num_workers: int, task: Callable[[int], str]) -> None:
        self._task = task
        self._notes = np.frombuffer(mmap.mmap(-1, 16 * max(num_workers, 1)), dtype=np.int64).reshape(-1, 2)

    def note(self, worker: int) -> None:
        """Write down the id of this process, and its memory of now."""
        self._notes[worker] = os.getpid(), _resident_bytes()

    def of(self, pid: int) -> str | None:
        """Say what is known of a process; None: it is none of these."""
        for worker, (noted_pid, num_bytes) in enumerate(self._notes.tolist()):
            if noted_pid == pid:
                return f"worker {worker} of {len(self._notes)}, {self._task(worker)}, {_mib(num_bytes)} when last seen"
        return None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell of a death here, and wherever the main thread is meanwhile.

        Raises:
            ResourceError: one of the processes has died.
        """
        _alive.add(self)
        before = signal.getsignal(signal.SIGCHLD)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(before) and not isinstance(before, _Handler):
            signal.signal(signal.SIGCHLD, _Handler(before))
        with _explained():
            yield


# As the handler is, of the process: several loaders may be open, and end in any order.
_alive: weakref.WeakSet[Vitals] = weakref.WeakSet()


class _Handler:
    """torch's handler of SIGCHLD, which stays for good, with what it raises explained."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        with _explained():
            self._handler(number, frame)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch has no class for it: `DataLoader worker (pid 1) is killed by signal` or `... exited unexpectedly`.
        if not str(error).startswith("DataLoader worker"):
            raise
        # Where torch was waiting for data, it catches what the handler has raised, and says less.
        raise error.__cause__ if isinstance(error.__cause__, ResourceError) else _describe(error) from error


def _describe(error: RuntimeError) -> ResourceError:
    pid = re.search(r"pid\S* (\d+)", str(error))
    known = [text for vitals in list(_alive) if pid and (text := vitals.of(int(pid[1]))) is not None]
    what = str(error).splitlines()[0].rstrip(". ")
    return ResourceError(
        "a process that reads data ahead has died, often because memory ran out",
        where=": ".join(["data.workers", *known]),
        found=f"{what}; this rank has {_mib(_resident_bytes())}; {system_memory()}",
        hint="more memory, fewer data.workers, a smaller data.prefetch, or data.workers=0",
    )


def system_memory() -> str:
    """What is left to the machine, and to its control group where that has a limit."""
    parts = []
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left, whole = (int(values[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
        parts.append(f"the machine has {_mib(left)} left of {_mib(whole)}")
    with contextlib.suppress(OSError, ValueError, IndexError):
        parts.append(_control_group())
    return "; ".join(part for part in parts if part) or "what the machine has left is not known"


def _control_group() -> str:
    """Limit, use and kills of the group of this process, of either version; nothing where it has no limit.

    Raises:
        OSError, ValueError, IndexError: they cannot be read.
    """
    for line in _own_groups():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, names = _CGROUPS / path.lstrip("/"), ("memory.max", "memory.current", "memory.events")
        elif "memory" in controllers.split(","):
            folder = _CGROUPS / "memory" / path.lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        else:
            continue
        if not (folder / names[0]).is_file():
            # Inside a container its own group is at the top.
            folder = _CGROUPS if not controllers else _CGROUPS / "memory"
        if not (folder / names[0]).is_file():
            continue
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        # Version 1 has a number for "none".
        if limit == "max" or int(limit) >= 1 << 60:
            continue
        events = dict(line.split() for line in (folder / names[2]).read_text().splitlines())
        kills = f", its processes killed for memory so far: {events['oom_kill']}" if "oom_kill" in events else ""
        return f"its control group uses {_mib(int(used))} of {_mib(int(limit))}{kills}"
    return ""


def _own_groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
