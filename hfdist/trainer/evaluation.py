"""Held-out loss that neither the batch size nor the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from hfdist.topology import Topology
from hfdist.trainer.dealing import CountingCollator


class DealtItems(Dataset[tuple[Any, bool]]):
    """Every data_size-th item of a dataset, filled up to the same number on each rank.

    Under ZeRO-3 every forward is a collective, so all ranks must run equally many. Items come with whether they count.
    """

    def __init__(self, dataset: Any, topology: Topology, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._rank, self._size = topology.data_rank, topology.data_size
        self.num_items = len(dataset)
        """Of all ranks together."""
        largest_share = -(-self.num_items // self._size)
        self._length = -(-largest_share // micro_batch_size) * micro_batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, bool]:
        place = index * self._size + self._rank
        counts = place < self.num_items
        return self._dataset[place if counts else 0], counts


def dealt_batches(
    dataset: Any, *, topology: Topology, micro_batch_size: int, collate: Callable[[list[Any]], Any]
) -> DataLoader[Any]:
    """Give this rank's batches of a map-style dataset; labels of items that only fill up are ignored."""
    return DataLoader(
        DealtItems(dataset, topology, micro_batch_size),
        batch_size=micro_batch_size,
        collate_fn=CountingCollator(collate),
    )


def mean_token_loss(
    batches: DataLoader[Any],
    evaluate: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> tuple[float, int]:
    """Sum losses and targets over this rank's batches and all ranks; give the mean loss and the number of targets."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        batch_total, batch_count = evaluate(batch)
        total += batch_total
        count += batch_count
    if dist.is_initialized():
        both = torch.stack([total, count])
        dist.all_reduce(both)
        total, count = both.unbind()
    return (total / count).item(), int(count.item())
