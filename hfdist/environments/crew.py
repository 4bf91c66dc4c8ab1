"""Threads that call environments side by side, each call within a time. A call that hangs is given up.

Python cannot end a thread. So one that hangs is left, another takes its place, and there is a limit of such.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Value = TypeVar("Value")

_MOST_LOST = 64
"""The most threads that may hang at a time; then all calls fail at once, until some return."""
_LOOK_SECONDS = 0.05
"""Seconds between looks for calls that take too long."""
_END_SECONDS = 1.0
"""Seconds for which the end of an idle thread is waited for."""


class HangsError(Exception):
    """A call has not returned in time."""


@dataclass(eq=False)
class _Job(Generic[Value]):
    key: int
    call: Callable[[], Value]
    began: float | None = None
    """When the call began, by a monotonic clock; None: it has not, or has returned."""
    thread: threading.Thread | None = None
    is_lost: bool = False
    """Whether nobody waits for it any more."""
    result: Value | BaseException | None = None


class Crew(Generic[Value]):
    """Calls functions in threads. They start with the first call, and end with `rest`.

    Args:
        seconds: the longest time of a call, from its start.
        size: the most calls at a time.
    """

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._size = seconds, size
        self._asked = SimpleQueue[_Job[Value] | None]()
        self._ended = SimpleQueue[_Job[Value]]()
        self._awaited = set[_Job[Value]]()
        self._threads: list[threading.Thread] = []
        self._lost: list[threading.Thread] = []
        self._deciding = threading.Lock()
        """Held while it is decided whether a call has returned, or is given up."""

    def submit(self, key: int, call: Callable[[], Value]) -> None:
        """Have a function called; `collect` gives its result with the key."""
        job = _Job(key, call)
        self._awaited.add(job)
        if len(self._threads) < min(self._size, len(self._awaited)):
            self._start()
        self._asked.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether results are still to come."""
        return bool(self._awaited)

    def collect(self, patience_seconds: float) -> list[tuple[int, Value | BaseException]]:
        """Wait for all results, but no longer than so, and give those that have come."""
        found: list[tuple[int, Value | BaseException]] = []
        end = time.monotonic() + patience_seconds
        while self._awaited:
            # Results that are there already are taken, however short the patience is.
            pause = max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))
            try:
                job = self._ended.get(timeout=pause) if pause else self._ended.get_nowait()
            except Empty:
                found += self._give_up()
                if time.monotonic() >= end:
                    break
            else:
                self._awaited.discard(job)
                assert job.result is not None
                found.append((job.key, job.result))
        return found

    def rest(self) -> None:
        """Wait for all calls, and end the threads, so that none is there when a process is forked."""
        while self._awaited:
            self.collect(self._seconds)
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self._threads = []

    def _start(self) -> None:
        self._lost = [thread for thread in self._lost if thread.is_alive()]
        if len(self._lost) < _MOST_LOST:
            # A daemon: the process does not wait for it at its end.
            thread = threading.Thread(target=self._work, daemon=True, name="environment")
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._asked.get()) is not None:
            job.thread = threading.current_thread()
            job.began = time.monotonic()
            try:
                job.result = job.call()
            except BaseException as error:  # whatever a package raises, `sys.exit` too
                job.result = error
            with self._deciding:
                if job.is_lost:
                    return
                job.began = None
                self._ended.put(job)

    def _give_up(self) -> list[tuple[int, Value | BaseException]]:
        """Leave the calls that take too long."""
        now, found = time.monotonic(), list[tuple[int, Value | BaseException]]()
        for job in list(self._awaited):
            with self._deciding:
                job.is_lost = job.began is not None and now - job.began > self._seconds
            if job.is_lost and job.thread is not None:
                found.append((job.key, HangsError(f"no answer within {self._seconds:g} s")))
                self._awaited.discard(job)
                self._threads.remove(job.thread)
                self._lost.append(job.thread)
                self._start()
        if not self._threads:
            found += [(job.key, HangsError(f"{len(self._lost)} calls hang already")) for job in self._awaited]
            self._awaited, self._asked = set(), SimpleQueue()
        return found
