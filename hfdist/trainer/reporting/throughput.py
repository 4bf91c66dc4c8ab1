"""Tokens, tokens a second, seconds a step and MFU of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from hfdist.models.flops import peak_flops


class Throughput:
    """Counts what the whole run reads, and tells the speed since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = 0
        """Tokens read by all data ranks since the beginning of the run, resumes included; who reads them adds them."""
        self._peak_flops = peak_flops(device)
        self._num_devices = 1
        self._flops: Callable[[int], float] = float
        self._sequence_length = self._last_step = self._last_tokens = 0
        self._last_seconds = 0.0

    def start(self, step: int, tokens: int, flops_per_token: Callable[[int], float], *, num_devices: int) -> None:
        """Start the clock behind so many steps and tokens; FLOPs of a token go by the length of its sequence."""
        self.tokens = self._last_tokens = tokens
        self._last_step = step
        self._flops, self._num_devices = cache(flops_per_token), num_devices
        self._last_seconds = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock: an evaluation or a save is not training."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._last_seconds += time.monotonic() - begin

    def flops_per_token(self, sequence_length: int) -> float:
        """Operations of one token; the model is counted once for each length."""
        self._sequence_length = sequence_length
        return self._flops(sequence_length)

    def read(self, step: int) -> dict[str, float]:
        """Give the figures since the last reading, for a line of metrics."""
        now = time.monotonic()
        seconds = max(now - self._last_seconds, 1e-9)
        tokens_per_second = (self.tokens - self._last_tokens) / seconds
        figures: dict[str, float] = {
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds / max(step - self._last_step, 1),
        }
        if self._peak_flops is not None and self._sequence_length:
            used = tokens_per_second * self.flops_per_token(self._sequence_length)
            figures["mfu"] = used / (self._peak_flops * self._num_devices)
        self._last_step, self._last_tokens, self._last_seconds = step, self.tokens, now
        return figures
