"""Measures the tokens that a run reads, tokens a second, and MFU (the share of the devices' peak FLOPs)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        self._flops: Callable[[int, int], float] = max
        self._sequence_length = self._target_length = self._last_step = self._last_tokens = 0
        self._squares: float | torch.Tensor = 0.0
        """Sum of the squares of the lengths of documents that this rank has read since the last reading."""
        self._placed_tokens = 0
        """Number of tokens in these documents."""
        self.clock = StepClock(device)
        self.of_rank = StepTimes(0.0, 0.0, None, None)
        """This rank's own times of the steps of the last reading."""

    def start(self, step: int, tokens: int, flops_per_token: Callable[[int, int], float], *, num_devices: int) -> None:
        """Start the clock after so many steps and tokens; FLOPs of a token go by lengths: of sequence and target."""
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

    def flops_per_token(self, sequence_length: int, target_length: int = 0) -> float:
        """Give the floating-point operations of one token in a sequence of this length, forward and backward.

        `target_length`: tokens of the target, in an encoder-decoder. The model is counted once for each length.
        """
        self._sequence_length, self._target_length = sequence_length, target_length
        return self._flops(sequence_length, target_length)

    def see_documents(self, positions: Iterable[torch.Tensor]) -> None:
        """Count the documents of batches by their positions, which restart at each document; for MFU alone."""
        if self._peak_flops is None:
            return
        for positions_of_batch in positions:
            # Images may have positions of their own: those of the text come first.
            of_text = positions_of_batch if positions_of_batch.ndim == 2 else positions_of_batch[0]
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
            a_token = self._flops(self._sequence_length, self._target_length)
            without_attention = self._flops(0, 0)
            mfu_of_flop = tokens_per_second / (self._peak_flops * self._num_devices)
            figures["mfu"] = mfu_of_flop * a_token
            if self._placed_tokens:
                share = float(self._squares) / self._placed_tokens / self._sequence_length
                of_documents = without_attention + share * (a_token - without_attention)
                figures["mfu_documents"] = mfu_of_flop * of_documents
        self._squares, self._placed_tokens = 0.0, 0
        self._last_step, self._last_tokens = step, self.tokens
        return figures
