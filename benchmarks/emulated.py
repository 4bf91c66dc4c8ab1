"""Pipeline stages that sleep instead of computing, so that schedules can be timed on few cores.

A stage's forward, input gradient and weight gradient are three *legs*. The two gradients are two autograd nodes: a
schedule that runs them apart finds them apart, which a single function computing both would not allow.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HIDDEN_SIZE = 256
WATCHED_SECONDS = 0.0002


class Leg(NamedTuple):
    """One leg that ran: F forward, I input gradient, W weight gradient; its end on the host's monotonic clock."""

    stage: int
    kind: str
    end_seconds: float


def sleep_seconds(seconds: float) -> None:
    """Sleep exactly: a plain sleep ends a tenth of a millisecond late, so the last bit is spent watching the clock."""
    due_seconds = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - WATCHED_SECONDS))
    while time.monotonic() < due_seconds:
        pass


class EmulatedStage(nn.Module):
    """One stage: [batch, hidden] -> [batch, hidden]; every leg sleeps and is written to `log`."""

    def __init__(self, stage: int, leg_seconds: float, log: list[Leg]) -> None:
        super().__init__()
        # A matrix: hfdist gives vectors their gradients at once.
        self.weight = nn.Parameter(torch.zeros(1, HIDDEN_SIZE))
        # As in a language model, the first stage too has parameters in front of its blocks, so it has an input
        # gradient to compute.
        self.embedding = nn.Parameter(torch.zeros(HIDDEN_SIZE)) if stage == 0 else None
        self._stage = stage
        self._leg_seconds = leg_seconds
        self._log = log

    def forward(self, hidden: Tensor) -> Tensor:
        """Both legs hang on the sum: the input gradient does not pass through the weight's node."""
        if self.embedding is not None:
            hidden = hidden + self.embedding
        return _InputLeg.apply(hidden, self) + _WeightLeg.apply(self.weight, self)

    def spend(self, kind: str) -> None:
        """Sleep for one leg and note it."""
        sleep_seconds(self._leg_seconds)
        self._log.append(Leg(self._stage, kind, time.monotonic()))


class _InputLeg(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        stage.spend("F")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stage.spend("I")
        return gradient, None


class _WeightLeg(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stage.spend("W")
        return gradient, None
