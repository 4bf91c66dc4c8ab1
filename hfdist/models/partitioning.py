"""How a layout divides a model while it is made: the interface that each layout implements."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import TrainingArguments


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Give the whole shape of a parameter, also of one that ZeRO-3 has partitioned: its own shape is then [0]."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Partitioning:
    """How a layout divides a model while it is made; this class leaves it whole, and layouts override its members."""

    partitions_in_constructor: bool = False
    """Whether transformers partitions each parameter as soon as the model's constructor has made it."""

    @property
    def sharing_keys(self) -> str:
        """The config keys because of which a rank holds parts of weights or some of the layers; empty: none is set."""
        return ""

    def partition(self, model: nn.Module) -> None:
        """Reduce a whole model to this rank's part, in place, before its weights are drawn, read or moved."""

    def gathered(self, parameters: Iterable[nn.Parameter], *, writes: bool) -> AbstractContextManager[object]:
        """Make partitioned parameters whole for a while, on all ranks.

        Args:
            parameters: the parameters, whole or partitioned.
            writes: whether rank 0's values at the end of the context stay, on all ranks.

        Returns:
            A context in which the parameters are whole.
        """
        return nullcontext()

    def without_partitioning(self, arguments: TrainingArguments) -> AbstractContextManager[object]:
        """Give a context in which this rank can make or read whole models of its own.

        `arguments`: the run's, by which transformers knows that models are partitioned.
        """
        return nullcontext()


WHOLE = Partitioning()
"""The layout of one process, which holds the whole model."""


def is_on_other_stage(module: nn.Module) -> bool:
    """Whether another rank of a pipeline holds the module's own parameters."""
    return len(module._parameters) > 0 and all(parameter is None for parameter in module._parameters.values())
