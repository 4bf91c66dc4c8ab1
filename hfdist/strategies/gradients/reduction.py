"""Gradients over groups of ranks: sums, averages, and the norm of them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 16 * 1024 * 1024
"""Elements that are added up over ranks at a time."""


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up gradients, or their shards, over the ranks of `group`, a few large messages at a time. In place.

    A parameter that no rank has used keeps its gradient of None, and so is not stepped, as in one process.

    Args:
        parameters: the same ones (of DTensors the same shards), in the same order, on every rank of the group.
        group: ranks that hold the same parameters, or the same shards of them.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted or dist.get_world_size(group) == 1:
        return
    for bucket in _buckets(list(_with_gradients(wanted, group))):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients, or their shards, over the ranks of `group`; see `sum_gradients`."""
    if dist.get_world_size(group) == 1:
        return
    divide_gradients(parameters, dist.get_world_size(group))
    sum_gradients(parameters, group)


def divide_gradients(parameters: Iterable[nn.Parameter], number: int) -> None:
    """Divide gradients, or this rank's shards of them, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).div_(number)


def total_norm(
    parameters: Iterable[nn.Parameter], groups: Iterable[dist.ProcessGroup], device: torch.device
) -> torch.Tensor:
    """Norm of the gradients of the whole model, with the same bits on all ranks and in all replicas of the model.

    Args:
        parameters: those that this rank counts; over the ranks of all groups each element is counted once.
        groups: whose ranks hold different parts of the model.
        device: this rank's device; it may have no gradient that would tell.
    """
    grads = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squared = torch.nn.utils.get_total_norm(grads).to(device, torch.float32) ** 2
    for group in groups:
        squared = sum_in_order(squared, group)
    return squared.sqrt()


def sum_in_order(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group. A reduction may add up in another order in each replica, whose weights would then part."""
    every = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, value, group=group)
    return torch.stack(every).sum()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Give what this rank holds of a tensor, live."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """Gradients of what any rank has used, zeros where this rank has not."""
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield local_tensor(parameter.grad)


def _buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    num_elements = 0
    for grad in grads:
        num_elements += grad.numel()
        if bucket and (num_elements > BUCKET_ELEMENTS or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_elements = [], grad.numel()
        bucket.append(grad)
    if bucket:
        yield bucket
