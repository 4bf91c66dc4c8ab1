"""Tokens, tokens a second and MFU of a run; and where the time of this rank's steps goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch

from hfdist.models.flops import peak_flops

T = TypeVar("T")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Where Linux counts the time that the calling thread runs, and waits for a core."""


class StepTimes(NamedTuple):
    """Seconds of a step, of one rank; None: not known, on a GPU."""

    step: float
    data: float
    """Seconds in the loader, until it gave the batches."""
    compute: float | None
    """Seconds on a CPU core, or ready to run while no core was free: a rank without a core is slow, too."""
    wait: float | None
    """Seconds in which the rank was blocked outside the loader."""


class StepClock:
    """Counts since the last reading, on the thread that trains; without what is `paused`.

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
        """Leave out what happens meanwhile."""
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
        # The clocks are not read at the same time.
        compute = min(busy, max(step - data, 0.0))
        return StepTimes(step / steps, data / steps, compute / steps, max(step - data - compute, 0.0) / steps)

    def _busy_seconds(self) -> float:
        # This clock is exact, and the kernel's count in the file is late by one of its ticks.
        on_core = time.thread_time()
        if self._schedstat is None:
            return on_core
        _, in_queue_ns, *_ = os.pread(self._schedstat.fileno(), 64, 0).split()
        return on_core + int(in_queue_ns) / 1e9


class Throughput:
    """Counts what the whole run reads, and tells the speed since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = 0
        """Tokens read by all data ranks since the beginning of the run, resumes included; who reads them adds them."""
        self._peak_flops = peak_flops(device)
        self._num_devices = 1
        self._flops: Callable[[int], float] = float
        self._sequence_length = self._last_step = self._last_tokens = 0
        self._squares: float | torch.Tensor = 0.0
        """Sum of the squares of the lengths of documents that this rank has read since the last reading."""
        self._placed_tokens = 0
        """Tokens of these documents."""
        self.clock = StepClock(device)
        self.of_rank = StepTimes(0.0, 0.0, None, None)
        """This rank's own times of the steps of the last reading."""

    def start(self, step: int, tokens: int, flops_per_token: Callable[[int], float], *, num_devices: int) -> None:
        """Start the clock after so many steps and tokens; FLOPs of a token go by the length of its sequence."""
        self.tokens = self._last_tokens = tokens
        self._last_step = step
        self._flops, self._num_devices = cache(flops_per_token), num_devices
        self._squares, self._placed_tokens = 0.0, 0
        self.clock.restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock: an evaluation or a save is not training."""
        with self.clock.paused():
            yield

    def flops_per_token(self, sequence_length: int) -> float:
        """Operations of one token; the model is counted once for each length."""
        self._sequence_length = sequence_length
        return self._flops(sequence_length)

    def see_documents(self, positions: Iterable[torch.Tensor]) -> None:
        """Count the documents of batches, where MFU is known; their positions restart."""
        for places in positions if self._peak_flops is not None else ():
            # Images may have positions of their own: those of the text come first.
            of_text = places if places.ndim == 2 else places[0]
            # The square of a length is the sum of as many odd numbers. It waits on the device until it is read.
            self._squares = self._squares + (2 * of_text + 1).sum()
            self._placed_tokens += of_text.numel()

    def read(self, step: int) -> dict[str, float]:
        """Give the figures since the last reading, for a line of metrics."""
        num_steps = max(step - self._last_step, 1)
        self.of_rank = self.clock.read(num_steps)
        tokens_per_second = (self.tokens - self._last_tokens) / (self.of_rank.step * num_steps)
        figures: dict[str, float] = {
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": self.of_rank.step,
        }
        if self._peak_flops is not None and self._sequence_length:
            a_token, without_attention = self.flops_per_token(self._sequence_length), self._flops(0)
            mfu_of_flop = tokens_per_second / (self._peak_flops * self._num_devices)
            figures["mfu"] = mfu_of_flop * a_token
            if self._placed_tokens:
                share = float(self._squares) / self._placed_tokens / self._sequence_length
                of_documents = without_attention + share * (a_token - without_attention)
                figures["mfu_documents"] = mfu_of_flop * of_documents
        self._squares, self._placed_tokens = 0.0, 0
        self._last_step, self._last_tokens = step, self.tokens
        return figures
