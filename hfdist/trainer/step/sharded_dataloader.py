"""A loader that deals the rows of a user's own dataset to data ranks: ranks of one model replica read the same.

A step reads the same rows in any layout, each of them once. Where they do not divide, as at the end of an epoch,
accelerate reads some rows twice; here the ranks that have none left read one row without its targets, which a loss
summed over targets does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from hfdist.data.packing.sequence import IGNORED
from hfdist.models.routers import COUNTED
from hfdist.strategies.engine import Batch
from hfdist.topology import Topology
from hfdist.trainer.step.convention import NUM_ROWS, ignored_like
from hfdist.trainer.step.global_batches import Collate, CountedRow, GlobalBatches, Share, as_it_is
from hfdist.trainer.step.same_draws import same_on_all_ranks

_COPIED = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
         "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")  # fmt: skip
"""Settings that the new loader takes over from the one in whose place it is made."""


class _Rows(Protocol):
    """A dataset whose rows have numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> object: ...


class Blank(int):
    """The number of a row that is read for its shape alone."""


class ShardedBatches(BatchSampler):
    """Every data_size-th batch of a sampler; a batch of one `Blank` row pads the last round.

    Five batches b0 to b4 and two data ranks:

        data rank 0    b0    b2    b4
        data rank 1    b1    b3    one blank row
    """

    def __init__(self, batches: BatchSampler, topology: Topology) -> None:
        # Under the names by which accelerate finds the sampler, to seed it and to put another one in its place.
        self.batch_sampler = batches
        self.sampler = batches.sampler
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last
        self._rank, self._size = topology.data_rank, topology.data

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        this_round: list[list[int]] = []
        for batch in self.batch_sampler:
            this_round.append(batch)
            if len(this_round) == self._size:
                yield this_round[self._rank]
                this_round = []
        if self._rank < len(this_round):
            yield this_round[self._rank]
        elif this_round:
            any_row = this_round[0][0]
            yield [Blank(any_row)]


class CountedRows(Dataset[CountedRow]):
    """The rows of a dataset, each with whether it counts: one whose number is a `Blank` does not."""

    total_dataset_length = 0
    """Rows that accelerate would have to drop from gathered metrics: none is read twice."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> CountedRow:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[CountedRow]:
        """Read several rows, at once where the dataset can."""
        numbers = [int(index) for index in indices]
        if hasattr(self._rows, "__getitems__"):
            rows = self._rows.__getitems__(numbers)
        else:
            rows = [self._rows[number] for number in numbers]
        return [CountedRow(row, not isinstance(index, Blank)) for row, index in zip(rows, indices, strict=True)]


class CountingCollator:
    """Collates rows with the user's collator; those that do not count get no targets."""

    def __init__(self, collate: Collate, label_names: Collection[str]) -> None:
        self._collate, self._label_names = collate, label_names

    def __call__(self, rows: list[CountedRow]) -> object:
        """Give the batch of all rows, those that do not count included."""
        blank = [not counts for _, counts in rows]
        batch = self._collate([row if counts else self._without_targets(row) for row, counts in rows])
        if not any(blank):
            return batch
        # Some collators make the labels themselves, so those of the batch are taken away, too.
        if all(blank):
            return without_targets(batch, self._label_names)
        for name in self._label_names:
            labels = batch.get(name)
            # In a tensor of another length nobody can tell which labels are of which row.
            if isinstance(labels, torch.Tensor) and labels.ndim > 0 and len(labels) == len(rows):
                labels[blank] = ignored_like(labels[blank])
        return batch

    def _without_targets(self, row: object) -> object:
        if not isinstance(row, Mapping):
            return row
        return {name: _ignored(value) if name in self._label_names else value for name, value in row.items()}


def without_targets(batch: object, label_names: Collection[str]) -> object:
    """Give a batch of the same shape that a loss summed over targets does not see."""
    if not isinstance(batch, Mapping):
        return batch
    changed: dict[str, torch.Tensor] = {}
    # Routers count no token of the batch, and a loss that counts rows counts none.
    if isinstance(batch.get("input_ids"), torch.Tensor):
        changed[COUNTED] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    if not any(name in batch for name in label_names):
        changed[NUM_ROWS] = torch.tensor(0)
    for name in label_names:
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor) and labels.ndim > 0:
            changed[name] = ignored_like(labels)
    return {**batch, **changed}


def fill_up_step(samples: list[Batch], num_microbatches: int, label_names: Collection[str] | None) -> list[Batch]:
    """Give as many micro batches as a step has, where a loader without a length has ended within the step.

    Args:
        samples: micro batches that were read.
        num_microbatches: number of micro batches in a whole step.
        label_names: names of the labels that the added batches lose; None: batches are read again with their labels.
    """
    if not 0 < len(samples) < num_microbatches:
        return samples
    fill = samples if label_names is None else [cast(Batch, without_targets(samples[0], label_names))]
    return list(islice(chain(samples, cycle(fill)), num_microbatches))


def _ignored(labels: object) -> object:
    """Give labels of the same shape that no loss sees; a single number stays, and is changed in the batch."""
    if isinstance(labels, torch.Tensor):
        return ignored_like(labels)
    return [IGNORED] * len(labels) if isinstance(labels, list) else labels


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How rows are dealt to ranks and micro batches."""

    topology: Topology
    num_microbatches: int
    """Micro batches of a data rank in a step; 1 in an evaluation."""
    label_names: Collection[str] | None
    """Names of the labels that a row loses if it only fills up; None: the loss is no sum over targets, and rows that
    fill up are read again with their labels."""
    seed: int
    """Seed of the order of the data."""
    is_training: bool
    """Whether the loader is that of the training; otherwise that of an evaluation."""

    def prepare(self, accelerator: Accelerator, loader: Any, before: Callable[[object], object]) -> object:
        """Give the loader of this rank; `before` is accelerate's own way, where this one does not apply."""
        if not self.is_training and loader.generator is None:
            # A loader draws a seed for its workers, also without any: not from the generator that training draws from.
            loader.generator = torch.Generator()
        # By default it is the seed that torch has now, which differs between the stages of a pipeline.
        accelerator.dataloader_config.data_seed = self.seed
        settings = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
        if isinstance(loader.dataset, IterableDataset):
            if loader.batch_size is None:
                return before(loader)
            batches = self._split_global_batches(loader, settings)
            whole: DataLoader[object] = DataLoader(batches, batch_size=None, collate_fn=as_it_is)
            # Each rank reads its own share already, so accelerate must not deal the batches once more.
            return prepare_for_data_ranks(accelerator, whole, num_ranks=1, rank=0)
        is_plain = isinstance(loader.batch_sampler, BatchSampler)
        if is_plain:
            is_seeded = accelerator.use_seedable_sampler
            sampler = same_on_all_ranks(loader.batch_sampler.sampler, self.seed, is_seeded=is_seeded)
            loader.batch_sampler.sampler = sampler
        if self.topology.data == 1 or self.label_names is None or not is_plain:
            return before(loader)
        sharded: DataLoader[CountedRow] = DataLoader(
            CountedRows(loader.dataset),
            batch_sampler=ShardedBatches(loader.batch_sampler, self.topology),
            collate_fn=CountingCollator(loader.collate_fn, self.label_names),
            **settings,
        )
        return prepare_for_data_ranks(accelerator, sharded, num_ranks=1, rank=0)

    def _split_global_batches(self, loader: Any, settings: dict[str, Any]) -> GlobalBatches:
        """Give this data rank's share of the global batches of a dataset whose rows have no numbers."""
        share = Share(
            None if self.label_names is None else CountingCollator(loader.collate_fn, self.label_names),
            loader.collate_fn,
            micro_batch_size=loader.batch_size,
            num_microbatches=self.num_microbatches,
            rank=self.topology.data_rank,
            num_ranks=self.topology.data,
        )
        return GlobalBatches(loader, share, seed=self.seed, is_training=self.is_training, settings=settings)


@contextmanager
def dealing(accelerator: Accelerator, how: Dealing) -> Iterator[None]:
    """Let loaders that are prepared within the block deal each row once, in the same order on all ranks."""
    before = accelerator.prepare_data_loader

    def prepare(
        data_loader: DataLoader[Any], device_placement: object = None, slice_fn_for_dispatch: object = None
    ) -> object:
        return how.prepare(
            accelerator, data_loader, lambda loader: before(loader, device_placement, slice_fn_for_dispatch)
        )

    accelerator.prepare_data_loader = prepare
    try:
        yield
    finally:
        accelerator.prepare_data_loader = before


def prepare_for_data_ranks(
    accelerator: Accelerator,
    data_loader: object,
    device_placement: object = None,
    slice_fn_for_dispatch: object = None,
    *,
    num_ranks: int,
    rank: int,
) -> object:
    """Prepare a loader as accelerate does, for one of `num_ranks` data ranks instead of one of all processes."""
    prepared = prepare_data_loader(
        data_loader,
        accelerator.device,
        num_processes=num_ranks,
        process_index=rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared
