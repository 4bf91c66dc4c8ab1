"""The loss of rows that several ranks all have: each computes a share, and all get the sum and every gradient.

The head is whole on each rank, and its gradients are averaged over these ranks later, with those of what else is whole:
so a rank gives the gradient of its own rows, times the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hfdist.models.lazy_logits import Rows, SumOfLosses


def share_rows(loss: SumOfLosses, group: dist.ProcessGroup) -> SumOfLosses:
    """Give a loss that is `loss` of all rows; the ranks of `group` call it with the same rows, and it is a collective.

    Gradients of the hidden states are whole on each rank. Those of the head must be averaged over the group.
    """

    def shared(rows: Rows) -> torch.Tensor:
        hidden = _Hidden.apply(rows.hidden, group)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        own = rows._replace(
            hidden=hidden.tensor_split(num_ranks)[rank], targets=rows.targets.tensor_split(num_ranks)[rank]
        )
        total: torch.Tensor = _Total.apply(loss(own), group)
        return total

    return shared


class _Hidden(torch.autograd.Function):
    """Backward: the rows' gradients of all ranks, without the factor that `_Total` gives to the head's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *of_hidden: torch.Tensor) -> Any:
        gradient = of_hidden[0] / dist.get_world_size(ctx.group)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Total(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: times their number."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.num_ranks = dist.get_world_size(group)
        total = total.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *of_total: torch.Tensor) -> Any:
        return of_total[0] * ctx.num_ranks, None
