"""Tokens, tokens a second, seconds a step and MFU of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from hfdist.models.flops import peak_flops
from hfdist.trainer.step.step_clock import StepClock, StepTimes


class Throughput:
    """Counts what the whole run reads, and tells the speed since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = 0
        """Tokens read by all data ranks since the beginning of the run, resumes included; who reads them adds them."""
        self._peak_flops = peak_flops(device)
        self._num_devices = 1
        self._flops: Callable[[int], float] = float
        self._sequence_length = self._last_step = self._last_tokens = 0
        self.clock = StepClock(device)
        self.of_rank = StepTimes(0.0, 0.0, None, None)
        """This rank's own times of the steps of the last reading."""

    def start(self, step: int, tokens: int, flops_per_token: Callable[[int], float], *, num_devices: int) -> None:
        """Start the clock after so many steps and tokens; FLOPs of a token go by the length of its sequence."""
        self.tokens = self._last_tokens = tokens
        self._last_step = step
        self._flops, self._num_devices = cache(flops_per_token), num_devices
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
            used = tokens_per_second * self.flops_per_token(self._sequence_length)
            figures["mfu"] = used / (self._peak_flops * self._num_devices)
        self._last_step, self._last_tokens = step, self.tokens
        return figures
