"""Whether the ranks of one model replica were given the same batch, on which all they compute together relies."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from hfdist.collectives import device_of
from hfdist.errors import DataError


def check_same_batch(
    batch: dict[str, torch.Tensor], group: dist.ProcessGroup, what: str, *, is_refused: bool = False
) -> bool:
    """Compare checksums over the ranks of `group`, a `what`. A collective of three numbers.

    `is_refused`: whether this rank must not take the step, for a reason of its own.

    Returns:
        Whether a rank must not take the step: the ranks stop together, or none waits for the others.

    Raises:
        DataError: the batches differ; on all ranks of the group.
    """
    # One number, whatever a batch holds: ranks with other tensors must reduce equally many.
    sums = [_checksum(name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor)]
    total = torch.stack(sums).sum()
    extremes = torch.stack([total, -total, torch.full_like(total, is_refused)]).to(device_of(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, negated_smallest, refusals = extremes.tolist()
    if largest != -negated_smallest:
        raise DataError(
            f"the ranks of one {what} were given different batches",
            where="train_dataset, data_collator",
            found="tensors that differ between ranks",
            allowed="the same items in the same order, and a collator that draws nothing at random",
            hint="draw in the dataset, from a generator seeded by the item's number",
        )
    return bool(refusals)


def _checksum(name: str, value: torch.Tensor) -> torch.Tensor:
    """Give a checksum of a tensor's name, shape and numbers; the same numbers in another order have another one."""
    # The bits of floats: as whole numbers, all between -1 and 1 would be zeros.
    numbers = (value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)).flatten()
    weights = torch.arange(1, len(numbers) + 1, device=value.device)
    content = (numbers * weights).sum() + sum(size * 10**6 for size in value.shape)
    # Odd, so that no bit of the content is lost, and another factor for each name.
    return (content + 1) * (2 * zlib.crc32(name.encode()) + 1)
