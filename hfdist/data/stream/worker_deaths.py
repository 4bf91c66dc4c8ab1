"""The message when a process that reads data for this one has died: which one it was, and how much memory is left.

loader process    writes its id and its memory into shared memory, about once a second; dies
this process      torch's handler of SIGCHLD raises a RuntimeError, wherever the main thread is at that moment
                  `explain_deaths` makes a ResourceError of it, with what the process wrote last
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

import numpy as np
import psutil

from hfdist.errors import ResourceError
from hfdist.host_memory import cgroup_memory

_HINT = "more memory, fewer data.workers, a smaller data.prefetch, or data.workers=0"


class WorkerRegistry:
    """Process ids and memory of loader processes, in shared memory that outlives them. Make it before the fork.

    Args:
        num_workers: the number of loader processes.
        task: says what a worker is for, by its number.
        key: the config key that sets how many workers there are.
        hint: what the user can do where one has died.
    """

    def __init__(
        self, num_workers: int, task: Callable[[int], str], *, key: str = "data.workers", hint: str = _HINT
    ) -> None:
        self.num_workers, self._task, self.key, self.hint = num_workers, task, key, hint
        # Two int64 for each worker: its process id and its resident bytes. A map of no bytes is an error.
        self._notes = np.frombuffer(mmap.mmap(-1, 16 * max(num_workers, 1)), dtype=np.int64).reshape(-1, 2)

    def note(self, worker: int) -> None:
        """Write down the id of this process, and the memory that it has now."""
        self._notes[worker] = os.getpid(), _resident_bytes()

    def describe(self, pid: int) -> str | None:
        """Describe the worker with this process id; None: no worker has noted it."""
        for worker, (noted_pid, num_bytes) in enumerate(self._notes.tolist()):
            if noted_pid == pid:
                return f"worker {worker} of {self.num_workers}, {self._task(worker)}, {_mib(num_bytes)} when last seen"
        return None

    @contextlib.contextmanager
    def explain_deaths(self) -> Iterator[None]:
        """Give a context in which the death of a worker is a ResourceError, here and wherever the main thread is."""
        _alive.add(self)
        before = signal.getsignal(signal.SIGCHLD)
        is_main = threading.current_thread() is threading.main_thread()
        # torch's handler stays for good; one with __wrapped__ was wrapped here before.
        if is_main and callable(before) and not hasattr(before, "__wrapped__"):
            signal.signal(signal.SIGCHLD, _explained()(before))
        with _explained():
            yield


# The process has one set of registries, as it has one handler: several loaders may be open, and end in any order.
_alive: weakref.WeakSet[WorkerRegistry] = weakref.WeakSet()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise a ResourceError in place of torch's RuntimeError about a loader process that has died."""
    try:
        yield
    except RuntimeError as error:
        # torch has no class for it: `DataLoader worker (pid 1) is killed by signal` or `... exited unexpectedly`.
        if not str(error).startswith("DataLoader worker"):
            raise
        if isinstance(error.__cause__, ResourceError):
            # If torch was waiting for data, it has caught the handler's error, and says less.
            raise error.__cause__ from error.__cause__.__cause__
        raise _describe(error) from error


def _describe(error: RuntimeError) -> ResourceError:
    owner, worker = _owner_of(str(error))
    what = str(error).splitlines()[0].rstrip(". ")
    return ResourceError(
        "a process that reads data has died, often because memory ran out",
        where=owner.key if worker is None else f"{owner.key}: {worker}",
        found=f"{what}; this process has {_mib(_resident_bytes())}; {system_memory()}",
        hint=owner.hint,
    )


def _owner_of(message: str) -> tuple[WorkerRegistry, str | None]:
    """Find the registry of the process that torch's message names, and the worker's description."""
    registries = list(_alive)
    pid = re.search(r"pid\S* (\d+)", message)
    if pid is not None:
        for registry in registries:
            worker = registry.describe(int(pid[1]))
            if worker is not None:
                return registry, worker
    # The process died before its first note. Most often one loader is open, and its key and hint are the right ones.
    return (registries[0] if registries else WorkerRegistry(0, str)), None


def system_memory() -> str:
    """Describe what is left to the machine, and to its control group where that has a limit."""
    machine = psutil.virtual_memory()
    parts = [f"the machine has {_mib(machine.available)} left of {_mib(machine.total)}"]
    group = cgroup_memory()
    if group is not None:
        kills = f"its processes killed for memory so far: {group.kills}"
        parts.append(f"its control group uses {_mib(group.used_bytes)} of {_mib(group.limit_bytes)}, {kills}")
    return "; ".join(parts)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
