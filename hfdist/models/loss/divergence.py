"""The generalized Jensen-Shannon divergence of a student from a teacher at each token (GKD, arXiv 2306.13649).

    beta 0        KL(teacher || student)
    between       beta KL(teacher || mix) + (1 - beta) KL(student || mix),  mix = beta teacher + (1 - beta) student
    beta 1        KL(student || teacher)

Its gradient by the student's logits follows from what its value needs, so both are computed at once.

Where only a teacher's likeliest tokens are known, all other tokens count as one more, the tail: its probability is the
sum of theirs.

    student    p1  p2  p3  p4  p5  p6        p5  p2  | p1 + p3 + p4 + p6
    teacher    .   t2  .   .   t5  .         t5  t2  | 1 - t5 - t2

The divergence over these buckets is at most that over all tokens, as to put tokens together can only hide differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

AddUp = Callable[[torch.Tensor], torch.Tensor]
"""Adds up values over the ranks that have the other columns."""
_SMALLEST = 1e-30
"""A tail has at least this probability: its logarithm is a number."""


def divergences_and_gradient(
    student: torch.Tensor, teacher: torch.Tensor, is_target: torch.Tensor, *, beta: float, add_up: AddUp
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the divergence of each row, and the gradient of their sum by the student's logits.

    Args:
        student: log-probabilities [rows, columns]: of all tokens, or of those that this rank has.
        teacher: log-probabilities of the same tokens.
        is_target: whether a row has a target, [rows]; other rows have divergence 0.
        beta: which divergence, from 0 (forward KL) to 1 (reverse KL).
        add_up: adds up sums over columns, of shape [rows].

    Returns:
        Values [rows], and the gradient [rows, columns].
    """
    probabilities = student.exp()
    if beta == 0.0:
        taught = teacher.exp()
        values = add_up((taught * (teacher - student)).sum(-1))
        gradient = probabilities.sub_(taught)
    else:
        if beta < 1.0:
            mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
            teacher_part = beta * add_up((teacher.exp() * (teacher - mixture)).sum(-1))
            slope = (student - mixture).mul_(1 - beta)
        else:
            teacher_part, slope = student.new_zeros(len(student)), student - teacher
        # `slope` is the derivative by a probability. The softmax takes its mean from it.
        student_part = add_up((probabilities * slope).sum(-1))
        values = teacher_part + student_part
        gradient = probabilities.mul_(slope.sub_(student_part[:, None]))
    # Chosen, not multiplied by zero: a row without a target need not be finite.
    return values.masked_fill(~is_target, 0), gradient.masked_fill_(~is_target[:, None], 0)


def top_divergences_and_gradient(
    student: torch.Tensor,
    teacher: torch.Tensor,
    ids: torch.Tensor,
    is_target: torch.Tensor,
    *,
    beta: float,
    add_up: AddUp,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the divergence of each row over some tokens and the tail, and the gradient of their sum.

    Args:
        student: log-probabilities [rows, columns]: of all tokens, or of those that this rank has.
        teacher: log-probabilities [rows, ids + 1]: of `ids`, and of all other tokens together.
        ids: tokens [rows, ids], each once in a row.
        is_target: whether a row has a target, [rows]; other rows have divergence 0.
        beta: which divergence, from 0 (forward KL) to 1 (reverse KL).
        add_up: adds up values over the ranks that have the other columns.
        start: the token of this rank's first column.

    Returns:
        Values [rows], and the gradient by the student's logits [rows, columns].
    """
    probabilities = student.exp()
    places = ids - start
    is_own = (places >= 0) & (places < student.shape[1])
    places = places.masked_fill(~is_own, 0)
    is_top = torch.zeros_like(student).scatter_add_(1, places, is_own.to(student.dtype)) > 0
    # A sum of the others, and not 1 less the top: that would be rounding where the tail is small.
    of_tail = add_up(probabilities.masked_fill(is_top, 0).sum(-1)).clamp_(min=_SMALLEST)
    of_top = add_up(student.gather(1, places).masked_fill(~is_own, 0))
    bucketed = torch.cat([of_top, of_tail.log()[:, None]], 1)
    # Without a tail, both have the same small number there.
    taught = teacher.clamp(min=math.log(_SMALLEST))
    values, slopes = divergences_and_gradient(bucketed, taught, is_target, beta=beta, add_up=lambda sums: sums)
    # Within the tail the student's probabilities keep their proportions.
    gradient = probabilities.mul_(slopes[:, -1:]).div_(of_tail[:, None]).masked_fill_(is_top, 0)
    gradient.scatter_add_(1, places, slopes[:, :-1].masked_fill(~is_own, 0))
    return values, gradient.masked_fill_(~is_target[:, None], 0)
