"""Rows of hidden states, with what makes logits of them: what a loss takes that needs no whole logits."""

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

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply it to logits [rows, vocabulary]."""
        return self.function(rows, *self.others)

    def of_columns(self, start: int, stop: int, vocabulary: int) -> LogitsOperation:
        """Give the same for logits of the tokens from `start` to `stop` alone: it works element by element."""
        others = tuple(
            other[..., start:stop]
            if isinstance(other, torch.Tensor) and other.ndim > 0 and other.shape[-1] == vocabulary
            else other
            for other in self.others
        )
        return LogitsOperation(self.function, others)


def cast(dtype: torch.dtype) -> LogitsOperation:
    """Give the operation that changes the type."""
    return LogitsOperation(torch.Tensor.to, (dtype,))


@dataclass
class DeferringHead:
    """A model's output embedding while it defers its logits."""

    module: nn.Module
    forward: Callable[..., torch.Tensor]
    """The module's own forward, as the model had it."""
    vocabulary: int
    """Logits of a row."""
    loss: SumOfLosses
    gathering: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes its parameters whole for a call; it may come after the model's forward, which has freed them."""
    made_whole: list[str] = field(default_factory=list)
    """The operations that needed all logits of a batch, one entry for each time."""
    is_deferring: bool = True


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
    label_smoothing: float
    reduce: Reduce | None = None
    """What becomes of the losses of the rows; None: their sum."""
    teacher: TeacherRows | None = None
    """What a row's loss is the divergence from; None: it is the cross entropy of its target."""

    def part(self, which: slice | torch.Tensor) -> DeferredRows:
        """Give the rows of a slice, or those where a mask, bool of shape [rows], is true."""
        teacher = None if self.teacher is None else self.teacher.part(which)
        return self._replace(hidden=self.hidden[which], targets=self.targets[which], teacher=teacher)


Reduce = Callable[[torch.Tensor], torch.Tensor]
"""From token losses, float32 of shape [rows], to one loss; it is differentiated. A row without a target has loss 0."""

SumOfLosses = Callable[[DeferredRows], torch.Tensor]
"""Gives the sum over rows, through which gradients flow to the hidden states and to the head."""
