"""A check that the ranks which compute one loss together were given the same batch."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from hfdist.collectives import device_of
from hfdist.errors import DataError


def check_same_batch(
    batch: dict[str, torch.Tensor], group: dist.ProcessGroup, what: str, *, is_refused: bool = False
) -> bool:
    """Compare checksums of a batch over the ranks of a group. A collective of three numbers.

    Args:
        batch: this rank's batch.
        group: the ranks that must have the same batch.
        what: what the group is, for the message.
        is_refused: whether this rank must not take the step, for a reason of its own.

    Returns:
        Whether some rank must not take the step. All ranks learn it here, so that they stop together, and none waits.

    Raises:
        DataError: the batches differ; raised on all ranks of the group.
    """
    # One number, whatever a batch holds: ranks with other tensors must reduce as many numbers.
    sums = [_checksum(name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor)]
    total = torch.stack(sums).sum()
    # The largest of the negated sums is the negated smallest sum: one reduction gives both ends.
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
    if value.is_floating_point():
        # The bits of floats: rounded to whole numbers, all between -1 and 1 would be zeros.
        numbers = value.double().view(torch.int64).flatten()
    else:
        numbers = value.to(torch.int64).flatten()
    weights = torch.arange(1, len(numbers) + 1, device=value.device)
    content = (numbers * weights).sum() + sum(size * 10**6 for size in value.shape)
    # Another factor for each name; it is odd, so that no bit of the content is lost.
    return (content + 1) * (2 * zlib.crc32(name.encode()) + 1)
