"""A model that a layout divides: how it is made, and what a rank can tell of parameters that it does not have."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import TrainingArguments


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Give the shape of a parameter that ZeRO-3 may have partitioned, and so left empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Partitioning:
    """How a layout changes a model while it is made; here: not at all. A `Strategy` overrides what it does."""

    partitions_in_constructor: bool = False
    """Whether transformers partitions each parameter as soon as the model's constructor has made it."""

    @property
    def sharing_keys(self) -> str:
        """The keys by which a rank has parts of weights, or some of the layers; empty: it has the whole model."""
        return ""

    def partition(self, model: nn.Module) -> None:
        """Reduce a whole model to this rank's part, in place, before its weights are drawn, read or moved."""

    def gathered(self, parameters: Iterable[nn.Parameter], *, writes: bool) -> AbstractContextManager[object]:
        """Make partitioned parameters whole for a while, on all ranks.

        Args:
            parameters: the parameters.
            writes: whether the values that rank 0 has at the end stay, on all ranks.
        """
        return nullcontext()

    def without_partitioning(self, arguments: TrainingArguments) -> AbstractContextManager[object]:
        """Let this rank make or read whole models of its own for a while; `arguments` are those of the run."""
        return nullcontext()


WHOLE = Partitioning()
"""The model as one process has it."""


def is_on_other_stage(module: nn.Module) -> bool:
    """Whether another rank of a pipeline holds the module's own parameters."""
    return len(module._parameters) > 0 and all(parameter is None for parameter in module._parameters.values())
