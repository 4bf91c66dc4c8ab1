"""Gradients over ranks: summed where several hold a parameter, and one norm for the whole model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hfdist.errors import DataError
from hfdist.strategies.gradients import reduction
from hfdist.strategies.gradients.reduction import sum_gradients, total_norm
from hfdist.strategies.same_batch import check_same_batch
from hfdist.testing import run_ranks

pytestmark = pytest.mark.distributed

WORLD = 3


def parameter(value, shape=(2, 3), dtype=torch.float32):
    """One with a gradient of equal numbers; None: without."""
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    made.grad = None if value is None else torch.full(shape, float(value), dtype=dtype)
    return made


def answers():
    """Everything that needs ranks, in one fork."""
    rank, group = dist.get_rank(), dist.group.WORLD
    # Used by all, by rank 1 alone, by none; frozen; of another type; more than one message holds.
    everywhere, once, never = parameter(rank), parameter(5 if rank == 1 else None), parameter(None)
    frozen = parameter(7).requires_grad_(False)
    half = parameter(1, dtype=torch.bfloat16)
    large = [parameter(rank, shape=(5,)) for _ in range(4)]
    transposed = parameter(0, shape=(4, 2))
    transposed.grad = (torch.arange(8.0).view(2, 4) * (rank + 1)).t()
    reduction.BUCKET_ELEMENTS = 12
    together = [everywhere, once, never, frozen, half, *large, transposed]
    sum_gradients(together, group)
    summed = [None if p.grad is None else p.grad.tolist() for p in together]
    assert half.grad.dtype is torch.bfloat16

    alone = dist.new_group([rank], use_local_synchronization=True)
    kept = parameter(rank)
    sum_gradients([kept], alone)
    sum_gradients([], group)

    own = [parameter(rank + 1, shape=(4,)), parameter(None)]
    norm = total_norm(own, [group], torch.device("cpu"))
    # A rank may count nothing, as one that only holds what others count.
    empty = total_norm([parameter(3.0, shape=(1,))] if rank == 0 else [], [group], torch.device("cpu"))

    batch = {"input_ids": torch.arange(6).view(2, 3), "features": torch.full((2, 3), 0.5)}
    assert not check_same_batch(batch, group, "tensor group")
    # What one rank refuses, all hear of.
    assert check_same_batch(batch, group, "pipeline", is_refused=rank == 1)
    with pytest.raises(DataError, match="different batches"):
        check_same_batch(batch | {"features": torch.full((2, 3), 0.1 * (rank + 1))}, group, "tensor group")
    # A rank may be given more tensors than others, or the same under other names.
    for differs in ({f"mask {number}": batch["features"] for number in range(rank)}, {f"mask {rank}": torch.ones(2)}):
        with pytest.raises(DataError, match="different batches"):
            check_same_batch(batch | differs, group, "tensor group")
    return summed, kept.grad.tolist(), norm.item(), empty.item()


def test_gradients_are_summed_over_ranks_and_the_norm_is_of_all():
    ramp = torch.arange(8.0).view(2, 4).t()
    norm = (4 * (1 + 4 + 9)) ** 0.5
    for rank, (summed, kept, of_all, of_rank_0) in enumerate(run_ranks(answers, WORLD)):
        everywhere, once, never, frozen, half, *large, transposed = summed
        assert everywhere == [[0 + 1 + 2] * 3] * 2
        assert once == [[5] * 3] * 2
        assert never is None, "the optimizer leaves it out, as in one process; zeros would decay its weight"
        assert frozen == [[7] * 3] * 2
        assert half == [[WORLD] * 3] * 2
        assert large == [[3] * 5] * 4
        assert transposed == (ramp * (1 + 2 + 3)).tolist()
        assert kept == [[rank] * 3] * 2, "a group of one has its sum"
        assert (of_all, of_rank_0) == pytest.approx((norm, 3.0), rel=1e-6)
