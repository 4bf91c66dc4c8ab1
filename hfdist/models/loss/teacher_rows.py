"""A teacher's distributions at rows, over all tokens or the likeliest ones, and a student's divergence from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hfdist.models.loss.divergence import AddUp, divergences_and_gradient, top_divergences_and_gradient


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of the student's logits that this rank has, as a range of tokens of the vocabulary."""

    start: int
    """The first token of the range."""
    stop: int
    """One past the last token of the range."""
    vocabulary: int
    """Number of tokens of the student's whole vocabulary."""
    add_up: AddUp = lambda sums: sums
    """Adds up values over the ranks that have the other columns."""


class TeacherRows(Protocol):
    """A teacher's distribution at some rows."""

    def part(self, which: slice | torch.Tensor) -> TeacherRows:
        """Give some of the rows: those of a slice, or those where a mask, bool of shape [rows], is true."""

    def compare(
        self, student: torch.Tensor, is_target: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the divergence of each row [rows], and the gradient of their sum by the student's logits.

        Args:
            student: the student's log-probabilities [rows, columns], at the columns of this rank.
            is_target: whether a row has a target, [rows]; other rows have divergence 0.
            columns: which columns of the vocabulary these are.
        """


class WholeRows(NamedTuple):
    """A teacher that gives logits of all tokens."""

    given: torch.Tensor
    """The teacher's hidden states of each row, of shape [rows, width]; or its logits, [rows, vocabulary]."""
    to_logits: Callable[[torch.Tensor], torch.Tensor]
    """Takes rows of `given`, and gives logits [rows, vocabulary]; the vocabulary may be larger than the student's."""
    beta: float
    """Which divergence, from 0 to 1: see `divergences_and_gradient`."""

    def part(self, which: slice | torch.Tensor) -> WholeRows:
        return self._replace(given=self.given[which])

    @torch.no_grad()
    def log_probabilities(self, vocabulary: int) -> torch.Tensor:
        """Give the teacher's log-probabilities of the first `vocabulary` tokens, as if there were no others.

        Returns:
            float32 of shape [rows, vocabulary]; float64 from a teacher of this type.
        """
        logits = self.to_logits(self.given)[:, :vocabulary]
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.log_softmax(-1)

    def compare(
        self, student: torch.Tensor, is_target: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taught = self.log_probabilities(columns.vocabulary)[:, columns.start : columns.stop]
        return divergences_and_gradient(student, taught, is_target, beta=self.beta, add_up=columns.add_up)


class TopRows(NamedTuple):
    """A teacher of which only the likeliest tokens are known."""

    ids: torch.Tensor
    """The likeliest tokens of each row; shape [rows, tokens]."""
    log_probabilities: torch.Tensor
    """Log-probabilities of these tokens, and of all others together; shape [rows, tokens + 1]."""
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
        teacher: the teacher's distributions at the same rows.
        is_target: whether a row has a target, [rows]; other rows have divergence 0.
    """
    values: torch.Tensor = _Divergences.apply(student, teacher, is_target)
    return values


class _Divergences(torch.autograd.Function):
    """A node of the graph that computes divergences, and in the same pass their gradient by the student's logits."""

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
