"""The whole model on every rank: one process, or data parallel with averaged gradients (DDP by accelerate)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hfdist.checkpoint.piece import Piece
from hfdist.strategies import pieces
from hfdist.strategies.base import Engine, Strategy


class ReplicatedStrategy(Strategy):
    """`strategy.sharding=none` without a model axis."""

    def build(self, model: nn.Module) -> ReplicatedEngine:
        """Take the model as it is: accelerate wraps it in DDP where there are several processes."""
        return ReplicatedEngine(model)


class ReplicatedEngine(Engine):
    """Everything as in the Hugging Face Trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Keep torch's optimizer, which accelerate has wrapped."""
        self._optimizer = optimizer.optimizer
        return optimizer

    def pieces(self) -> Iterable[Piece]:
        """List every parameter and its optimizer state, whole."""
        return pieces.list_pieces(self.model, self._optimizer)
