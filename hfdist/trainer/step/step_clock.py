"""A clock that tells how much of this rank's steps goes to the loader, to computing, and to waiting for others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""The file in which Linux counts the time that the calling thread runs, and waits for a core; in nanoseconds."""


class StepTimes(NamedTuple):
    """Times of a step of one rank; None: not known, as on a GPU."""

    step: float
    """Seconds of the whole step."""
    data: float
    """Seconds in the loader, until it gave the batches."""
    compute: float | None
    """Seconds on a CPU core, or ready to run while no core was free: a rank without a core is slow, too."""
    wait: float | None
    """Seconds in which the rank was blocked outside the loader."""


class StepClock:
    """Counts the time since the last reading, on the thread that trains, without what is `paused`.

    A CPU computes a forward and a backward on the calling thread, and gloo communicates on threads of its own: a rank
    whose main thread is blocked waits. A GPU works while its caller goes on, and its kernels wait by themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._schedstat: BinaryIO | None = None
        self.restart()

    def restart(self) -> None:
        """Count from now on, on the calling thread."""
        self._schedstat = None
        if self._is_cpu:
            # Kept open: this costs a microsecond a reading. Not each system has it.
            with suppress(OSError):
                self._schedstat = _SCHEDSTAT.open("rb", buffering=0)
        self._begin()

    def _begin(self) -> None:
        self._begin_seconds, self._begin_busy_seconds = time.monotonic(), self._busy_seconds()
        self._data_seconds = self._data_busy_seconds = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out."""
        begin, busy_begin = time.monotonic(), self._busy_seconds()
        try:
            yield
        finally:
            self._begin_seconds += time.monotonic() - begin
            self._begin_busy_seconds += self._busy_seconds() - busy_begin

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Give the batches, and count the time that each takes to come."""
        source = iter(batches)
        while True:
            begin, busy_begin = time.monotonic(), self._busy_seconds()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._data_seconds += time.monotonic() - begin
                self._data_busy_seconds += self._busy_seconds() - busy_begin
            yield batch

    def read(self, num_steps: int) -> StepTimes:
        """Give the mean of so many steps since the last reading, and begin anew."""
        steps, data = max(num_steps, 1), self._data_seconds
        step = max(time.monotonic() - self._begin_seconds, 1e-9)
        busy = self._busy_seconds() - self._begin_busy_seconds - self._data_busy_seconds
        self._begin()
        if not self._is_cpu:
            return StepTimes(step / steps, data / steps, None, None)
        # Limited, as the two clocks are not read at the same time.
        compute = min(busy, max(step - data, 0.0))
        return StepTimes(step / steps, data / steps, compute / steps, max(step - data - compute, 0.0) / steps)

    def _busy_seconds(self) -> float:
        """Give the time that this thread has run, or was ready to run, since it began."""
        # This clock is exact, and the kernel's count in the file is late by one of its ticks.
        on_core = time.thread_time()
        if self._schedstat is None:
            return on_core
        _, in_queue_ns, *_ = os.pread(self._schedstat.fileno(), 64, 0).split()
        return on_core + int(in_queue_ns) / 1e9
