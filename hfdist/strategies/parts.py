"""Which part of each parameter a rank holds before FSDP2 shards it, whatever the engine that runs the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from hfdist.checkpoint.piece import Piece


class ModelParts(ABC):
    """What an engine asks where the ranks of a group share parameters, and compute one loss together."""

    group: dist.ProcessGroup
    """Ranks that hold the model between them; what is whole on each has the same values on all."""

    description = ""
    """How the parameters are shared, for people."""

    tokens_group: dist.ProcessGroup
    """Ranks that hold the same parts, and have other tokens."""

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for its group where all have computed the same."""
        return self.group.rank() == 0

    @abstractmethod
    def begin(self, batch: dict[str, torch.Tensor]) -> None:
        """Prepare for a forward of a batch in training. A collective; DataError: ranks were given different batches."""

    @abstractmethod
    def reduce_gradients(self, model: nn.Module) -> None:
        """Give parameters that are whole on each rank one gradient, in place. A collective."""

    @abstractmethod
    def counts(self, name: str) -> bool:
        """Whether this rank counts the gradient of a parameter in the norm, so that over the group each counts once."""

    @abstractmethod
    def whole_shape(self, model: nn.Module, parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Give the shape in the whole model of a parameter that has `shape` in this rank's."""

    @abstractmethod
    def name_part(self, name: str) -> str:
        """Give a name that says of which rank a part is; that of a whole parameter stays."""

    @abstractmethod
    def own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give pieces of the whole model, from one of this rank's model as if that were whole."""

    @abstractmethod
    def after_load(self) -> None:
        """Take note that a checkpoint has set the state of this rank."""
