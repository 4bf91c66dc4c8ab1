"""What a teacher says of rows, and how far a student's distribution is from it: by all tokens, or by the likeliest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hfdist.models.loss.divergence import AddUp, divergences_and_gradient, top_divergences_and_gradient


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The tokens of which a rank has the student's logits."""

    start: int
    stop: int
    vocabulary: int
    """Tokens of the student."""
    add_up: AddUp = lambda sums: sums
    """Adds up values over the ranks that have the others."""


class TeacherRows(Protocol):
    """A teacher's distribution at some rows."""

    def part(self, which: slice | torch.Tensor) -> TeacherRows:
        """Give some of the rows, by a slice or by which count, bool [rows]."""

    def compare(
        self, student: torch.Tensor, is_target: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the divergence of each row [rows], and the gradient of their sum by the student's logits.

        Args:
            student: log-probabilities [rows, columns].
            is_target: [rows]; other rows have divergence 0.
            columns: those of `student`.
        """


class WholeRows(NamedTuple):
    """A teacher that gives logits of all tokens."""

    given: torch.Tensor
    """Shape [rows, width]."""
    to_logits: Callable[[torch.Tensor], torch.Tensor]
    """From some rows of `given` to logits [rows, vocabulary]; the vocabulary may be larger than the student's."""
    beta: float
    """Which divergence, from 0 to 1: see `divergences_and_gradient`."""

    def part(self, which: slice | torch.Tensor) -> WholeRows:
        return self._replace(given=self.given[which])

    @torch.no_grad()
    def log_probabilities(self, vocabulary: int) -> torch.Tensor:
        """Give those of the first `vocabulary` tokens among each other, float32 of shape [rows, vocabulary]."""
        logits = self.to_logits(self.given)[:, :vocabulary]
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)

    def compare(
        self, student: torch.Tensor, is_target: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taught = self.log_probabilities(columns.vocabulary)[:, columns.start : columns.stop]
        return divergences_and_gradient(student, taught, is_target, beta=self.beta, add_up=columns.add_up)


class TopRows(NamedTuple):
    """A teacher of which the likeliest tokens are known."""

    ids: torch.Tensor
    """Shape [rows, tokens]."""
    log_probabilities: torch.Tensor
    """Log-probabilities of these, and of all others together; shape [rows, tokens + 1]."""
    beta: float
    """Which divergence, from 0 to 1: see `divergences_and_gradient`."""

    def part(self, which: slice | torch.Tensor) -> TopRows:
        return TopRows(self.ids[which], self.log_probabilities[which], self.beta)

    def compare(
        self, student: torch.Tensor, is_target: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return top_divergences_and_gradient(
            student,
            self.log_probabilities,
            self.ids.long(),
            is_target,
            beta=self.beta,
            add_up=columns.add_up,
            start=columns.start,
        )


def divergences(student: torch.Tensor, teacher: TeacherRows, is_target: torch.Tensor) -> torch.Tensor:
    """Give the divergence of each row, in nats; shape [rows]. It is differentiated by the student's logits.

    Args:
        student: logits [rows, vocabulary].
        teacher: of the same rows.
        is_target: [rows]; other rows have divergence 0.
    """
    values: torch.Tensor = _Divergences.apply(student, teacher, is_target)
    return values


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: TeacherRows, is_target: torch.Tensor) -> torch.Tensor:
        vocabulary = student.shape[-1]
        columns = Columns(start=0, stop=vocabulary, vocabulary=vocabulary)
        values, gradient = teacher.compare(student.log_softmax(-1), is_target, columns)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *of_values: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_values[0][:, None], None, None
