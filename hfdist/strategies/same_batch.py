"""Whether the ranks of one model replica were given the same batch, on which all they compute together relies."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hfdist.collectives import device_of
from hfdist.errors import DataError


def check_same_batch(batch: dict[str, torch.Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Compare checksums over the ranks of `group`, a `what`. A collective of a few bytes.

    Raises:
        DataError: the batches differ.
    """
    sums = torch.stack([_checksum(value) for value in batch.values() if isinstance(value, torch.Tensor)])
    extremes = torch.cat([sums, -sums]).to(device_of(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    if not torch.equal(largest, -smallest):
        raise DataError(
            f"the ranks of one {what} were given different batches",
            where="train_dataset, data_collator",
            found="tensors that differ between ranks",
            allowed="the same items in the same order, and a collator that draws nothing at random",
            hint="draw in the dataset, from a generator seeded by the item's number",
        )


def _checksum(value: torch.Tensor) -> torch.Tensor:
    """Give a checksum of a tensor's shape and numbers; other orders of the same numbers have other checksums."""
    # As whole numbers, shares of one would all be zeros.
    numbers = (value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)).flatten()
    places = torch.arange(1, len(numbers) + 1, device=value.device)
    return (numbers * places).sum() + sum(size * 10**6 for size in value.shape)
