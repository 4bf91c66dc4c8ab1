"""The input of a loss that needs no whole logits: rows of hidden states, and how logits are made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from hfdist.models.loss.teacher_rows import TeacherRows


@dataclass(frozen=True)
class LogitsOperation:
    """One operation of a model on its logits: a function of each row, and of values that all rows share."""

    function: Callable[..., torch.Tensor]
    others: tuple[object, ...] = ()
    """The values that all rows share: further arguments of the function."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the operation to logits [rows, vocabulary]."""
        return self.function(rows, *self.others)

    def of_columns(self, start: int, stop: int, vocabulary: int) -> LogitsOperation:
        """Give the operation for the columns from `start` to `stop` of all `vocabulary` columns of the logits.

        All operations work element by element, so it is the same one with a part of each value that has columns.
        """
        others = tuple(
            other[..., start:stop]
            if isinstance(other, torch.Tensor) and other.ndim > 0 and other.shape[-1] == vocabulary
            else other
            for other in self.others
        )
        return LogitsOperation(self.function, others)


def cast(dtype: torch.dtype) -> LogitsOperation:
    """Give the operation that changes the type of logits to `dtype`."""
    return LogitsOperation(torch.Tensor.to, (dtype,))


@dataclass
class DeferringHead:
    """A model's output embedding while it defers its logits."""

    module: nn.Module
    forward: Callable[..., torch.Tensor]
    """The module's own forward, as the model had it."""
    vocabulary: int
    """Number of logits of a row."""
    loss: SumOfLosses
    """Computes the loss of rows of this head."""
    gathering: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the module's parameters whole for a call: the model's forward may have freed them before."""
    made_whole: list[str] = field(default_factory=list)
    """The operations that needed all logits of a batch, one entry for each time."""
    is_deferring: bool = True
    """False: the context of `deferring` has ended, and the module is as before."""


class DeferredRows(NamedTuple):
    """The arguments of `cross_entropy`, with hidden states in place of logits."""

    head: DeferringHead
    hidden: torch.Tensor
    """Shape [rows, width]."""
    targets: torch.Tensor
    """Class indices, of shape [rows]."""
    per_row: tuple[LogitsOperation, ...]
    """Operations that make logits of the head's output."""
    ignore_index: int
    """The class index of rows without a target."""
    label_smoothing: float
    reduce: Reduce | None = None
    """Makes one loss of the losses of all rows; None: their sum."""
    teacher: TeacherRows | None = None
    """Distributions: a row's loss is its divergence from them. None: the loss is the cross entropy of its target."""

    def part(self, which: slice | torch.Tensor) -> DeferredRows:
        """Give the rows of a slice, or those where a mask, bool of shape [rows], is true."""
        teacher = None if self.teacher is None else self.teacher.part(which)
        return self._replace(hidden=self.hidden[which], targets=self.targets[which], teacher=teacher)


Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Takes token losses, float32 of shape [rows], and gives one loss, which is differentiated. The loss of a row without a
target is 0."""

SumOfLosses = Callable[[DeferredRows], torch.Tensor]
"""Takes rows, and gives the sum of their losses, through which gradients flow to the hidden states and to the head."""
