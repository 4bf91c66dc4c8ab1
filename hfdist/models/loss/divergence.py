"""The generalized Jensen-Shannon divergence of a student from a teacher at each token (GKD, arXiv 2306.13649).

    beta 0        KL(teacher || student)
    between       beta KL(teacher || mix) + (1 - beta) KL(student || mix),  mix = beta teacher + (1 - beta) student
    beta 1        KL(student || teacher)

Its gradient by the student's logits follows from what its value needs, so both are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

AddUp = Callable[[torch.Tensor], torch.Tensor]
"""Adds up values over the ranks that have the other columns."""


def divergences(student: torch.Tensor, teacher: torch.Tensor, is_target: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Give the divergence of each row, in nats; shape [rows]. It is differentiated by the student's logits.

    Args:
        student: logits [rows, vocabulary].
        teacher: logits of the same shape and type.
        is_target: [rows]; other rows have divergence 0.
        beta: from 0 to 1.
    """
    values: torch.Tensor = _Divergences.apply(student, teacher, is_target, beta)
    return values


def divergences_and_gradient(
    student: torch.Tensor, teacher: torch.Tensor, is_target: torch.Tensor, *, beta: float, add_up: AddUp
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the divergence of each row, and the gradient of their sum by the student's logits.

    Args:
        student: log-probabilities [rows, columns]: of all tokens, or of those that this rank has.
        teacher: log-probabilities of the same tokens.
        is_target: [rows]; other rows have divergence 0.
        beta: from 0 to 1.
        add_up: adds up sums over columns, of shape [rows].
    """
    own = student.exp()
    if beta == 0.0:
        taught = teacher.exp()
        values = add_up((taught * (teacher - student)).sum(-1))
        gradient = own.sub_(taught)
    else:
        of_teacher, slope = student.new_zeros(len(student)), student - teacher
        if beta < 1.0:
            mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
            of_teacher = beta * add_up((teacher.exp() * (teacher - mixture)).sum(-1))
            slope = (student - mixture).mul_(1 - beta)
        of_student = add_up((own * slope).sum(-1))
        values = of_teacher + of_student
        gradient = own.mul_(slope.sub_(of_student[:, None]))
    # Chosen, not multiplied by zero: a row without a target need not be finite.
    return values.masked_fill(~is_target, 0), gradient.masked_fill_(~is_target[:, None], 0)


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, is_target: torch.Tensor, beta: float
    ) -> torch.Tensor:
        values, gradient = divergences_and_gradient(
            student.log_softmax(-1), teacher.log_softmax(-1), is_target, beta=beta, add_up=lambda sums: sums
        )
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *of_values: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_values[0][:, None], None, None, None
