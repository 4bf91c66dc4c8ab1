"""The whole model on every rank: one process, or data parallel with averaged gradients (DDP by accelerate)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hfdist.checkpoint.piece import Piece
from hfdist.config.batch import BatchPlan
from hfdist.strategies import pieces_replicated
from hfdist.strategies.base import ShardFractions
from hfdist.strategies.default import DefaultEngine
from hfdist.topology import Topology


class ReplicatedStrategy:
    """`strategy.sharding=none` without a model axis."""

    def __init__(self, topology: Topology, batch: BatchPlan) -> None:
        self.topology = topology
        self.batch = batch
        self.shares = ShardFractions(weights=1.0, gradients=1.0, optimizer=1.0)

    def training_arguments(self) -> dict[str, object]:
        """Gradient accumulation by the Trainer itself."""
        return {
            "gradient_accumulation_steps": self.batch.num_microbatches,
            "per_device_train_batch_size": self.batch.micro_batch_size,
        }

    def agreed_arguments(self) -> dict[str, object]:
        """None: precision and clipping are the Trainer's."""
        return {}

    def start(self) -> None:
        """Nothing to do."""

    def cut(self, model: nn.Module) -> None:
        """Nothing to do: every rank holds the whole model."""

    def build(self, model: nn.Module) -> ReplicatedEngine:
        """Take the model as it is: accelerate wraps it in DDP where there are several processes."""
        return ReplicatedEngine(model)


class ReplicatedEngine(DefaultEngine):
    """Everything as in the Hugging Face Trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Keep torch's optimizer, which accelerate has wrapped."""
        self._optimizer = optimizer.optimizer
        return optimizer

    def pieces(self) -> Iterable[Piece]:
        """Every parameter and its optimizer state, whole."""
        return pieces_replicated.list_pieces(self.model, self._optimizer)

    def numbers(self) -> dict[str, Any]:
        """None: the Trainer keeps the loss scale."""
        return {}

    def restore_numbers(self, numbers: dict[str, Any]) -> None:
        """Nothing to take."""

    def loaded(self) -> None:
        """Nothing is derived from the pieces."""
