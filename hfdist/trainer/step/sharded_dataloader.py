"""Shard the rows of a user's own dataset over data ranks: ranks of one model replica must read the same.

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
from hfdist.trainer.step.global_batches import Collate, GlobalBatches, Share, as_it_is
from hfdist.trainer.step.same_draws import same_on_all_ranks

_COPIED = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
         "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")  # fmt: skip
"""Settings of a loader that one made in its place gets, too."""


class _Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> object: ...


class Blank(int):
    """The number of a row that is read for its shape alone."""


class ShardedBatches(BatchSampler):
    """Every data_size-th batch of a sampler; a batch of one `Blank` row pads the last round."""

    def __init__(self, batches: BatchSampler, topology: Topology) -> None:
        # Under the names by which accelerate finds the sampler, to seed it and to put another one in its place.
        self.batch_sampler = batches
        self.sampler = batches.sampler
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last
        self._rank, self._size = topology.data_rank, topology.data

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        group: list[list[int]] = []
        for batch in self.batch_sampler:
            group.append(batch)
            if len(group) == self._size:
                yield group[self._rank]
                group = []
        if group:
            yield group[self._rank] if self._rank < len(group) else [Blank(group[0][0])]


class CountedRows(Dataset[tuple[object, bool]]):
    """Rows together with whether they count."""

    total_dataset_length = 0
    """Rows that accelerate would have to drop from gathered metrics: none is read twice."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[object, bool]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[object, bool]]:
        """Read several rows at once, where the dataset can."""
        numbers = [int(index) for index in indices]
        read = getattr(self._rows, "__getitems__", lambda numbers: [self._rows[number] for number in numbers])
        return [(row, not isinstance(index, Blank)) for row, index in zip(read(numbers), indices, strict=True)]


class CountingCollator:
    """Collates rows with the user's collator; those that do not count get no targets."""

    def __init__(self, collate: Collate, label_names: Collection[str]) -> None:
        self._collate, self._label_names = collate, label_names

    def __call__(self, rows: list[tuple[object, bool]]) -> object:
        """Give the batch, with as many rows."""
        blank = [not counts for _, counts in rows]
        batch = self._collate([row if counts else self._without_targets(row) for row, counts in rows])
        # Once more, where it can be told which labels are of which row: some collators make them.
        if all(blank):
            return without_targets(batch, self._label_names)
        for name in self._label_names if any(blank) else ():
            labels = batch.get(name)
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
    """Fill up the last step of a loader without a length, if it ended within; `label_names` is as in `Dealing`."""
    if not 0 < len(samples) < num_microbatches:
        return samples
    fill = samples if label_names is None else [cast(Batch, without_targets(samples[0], label_names))]
    return list(islice(chain(samples, cycle(fill)), num_microbatches))


def _ignored(labels: object) -> object:
    """Only where collators may need it: single labels are told from their rows in the batch."""
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
    """Labels that rows lose which fill up; None: the loss is no sum over targets, and rows are read again."""
    seed: int
    """Seed of the data."""
    is_training: bool

    def prepare(self, accelerator: Accelerator, loader: Any, before: Callable[[object], object]) -> object:
        """Give the loader of this rank; `before` is accelerate's own way, where this one does not apply."""
        if not self.is_training and loader.generator is None:
            # A loader draws a seed for its workers, also without any: not from the generator that training draws from.
            loader.generator = torch.Generator()
        # By default it is the seed that torch has now, which differs between the stages of a pipeline.
        accelerator.dataloader_config.data_seed = self.seed
        copied = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
        if isinstance(loader.dataset, IterableDataset):
            if loader.batch_size is None:
                return before(loader)
            share = Share(
                None if self.label_names is None else CountingCollator(loader.collate_fn, self.label_names),
                loader.collate_fn,
                micro_batch_size=loader.batch_size,
                num_microbatches=self.num_microbatches,
                rank=self.topology.data_rank,
                num_ranks=self.topology.data,
            )
            batches = GlobalBatches(loader, share, seed=self.seed, is_training=self.is_training, settings=copied)
            whole: DataLoader[object] = DataLoader(batches, batch_size=None, collate_fn=as_it_is)
            return prepare_for_data_ranks(accelerator, whole, num_ranks=1, rank=0)
        is_plain = isinstance(loader.batch_sampler, BatchSampler)
        if is_plain:
            is_seeded = accelerator.use_seedable_sampler
            sampler = same_on_all_ranks(loader.batch_sampler.sampler, self.seed, is_seeded=is_seeded)
            loader.batch_sampler.sampler = sampler
        if self.topology.data == 1 or self.label_names is None or not is_plain:
            return before(loader)
        sharded: DataLoader[tuple[object, bool]] = DataLoader(
            CountedRows(loader.dataset),
            batch_sampler=ShardedBatches(loader.batch_sampler, self.topology),
            collate_fn=CountingCollator(loader.collate_fn, self.label_names),
            **copied,
        )
        return prepare_for_data_ranks(accelerator, sharded, num_ranks=1, rank=0)


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
    """`Accelerator.prepare_data_loader`, over so many data ranks instead of all processes."""
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
