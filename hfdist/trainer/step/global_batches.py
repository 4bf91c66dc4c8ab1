"""Rows of an IterableDataset as global batches: the same rows in the same step, in every layout.

Each rank iterates over all rows, forms global batches, and collates its own share of each. The last global batch of a
pass may have fewer rows. What ranks and micro batches lack there is filled up.

    rows of a global batch    r0 r1 | r2 r3 | r4 r5 | r6 r7       2 data ranks, 2 micro batches of 2 rows each
    data rank                   0       1       0       1
    micro batch                 0       0       1       1
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hfdist.collectives import gather_json
from hfdist.errors import DataError
from hfdist.trainer.step.same_draws import SameRows

Collate = Callable[[list[Any]], Any]
"""Makes a batch of rows, whatever these are."""
T = TypeVar("T")


class CountedRow(NamedTuple):
    """A row, and whether it counts for the loss."""

    row: object
    counts: bool


class Share:
    """Collates what one data rank has of a global batch, as a list of micro batches.

    Args:
        collate: makes a batch of counted rows; None: rows are read again to fill a global batch.
        collate_rows: makes a batch of rows.
        micro_batch_size: number of rows in a micro batch of one data rank.
        num_microbatches: number of micro batches of one data rank in a step.
        rank: number of this data rank.
        num_ranks: number of data ranks.
    """

    def __init__(
        self,
        collate: Callable[[list[CountedRow]], object] | None,
        collate_rows: Collate,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._collate, self._collate_rows = collate, collate_rows
        self._micro_batch_size, self.num_microbatches = micro_batch_size, num_microbatches
        self._rank, self._num_ranks = rank, num_ranks
        self.is_first = True
        """Whether the next rows are the first of a pass."""

    @property
    def num_rows(self) -> int:
        """Number of rows in a global batch."""
        return self._micro_batch_size * self.num_microbatches * self._num_ranks

    def __call__(self, rows: list[object]) -> tuple[str | None, list[object]]:
        """Give the micro batches of a global batch, and before them the fingerprint of the first rows of a pass."""
        # The other global batches of a pass have None: comparing each one would cost a message.
        mark = fingerprint(rows) if self.is_first else None
        self.is_first = False
        if self._collate is None:
            rows = list(islice(cycle(rows), self.num_rows))
        size = self._micro_batch_size
        begins = range(self._rank * size, self.num_rows, size * self._num_ranks)
        return mark, [self._collated(rows[begin : begin + size], rows[0]) for begin in begins]

    def _collated(self, rows: list[object], any_row: object) -> object:
        if self._collate is None:
            return self._collate_rows(rows)
        counted = [CountedRow(row, True) for row in rows]
        # A rank that has no row left reads one without its targets; map-style data do the same.
        return self._collate(counted or [CountedRow(any_row, False)])


class GlobalBatches(IterableDataset[object]):
    """The micro batches of one data rank, one after the other.

    Args:
        loader: loads the user's rows, as transformers made it.
        share: collates what this rank has of a global batch.
        seed: seeds the order of the data.
        is_training: whether the order changes from one pass to the next.
        settings: further arguments of the loader.
    """

    def __init__(
        self, loader: DataLoader[Any], share: Share, *, seed: int, is_training: bool, settings: Mapping[str, Any]
    ) -> None:
        self._rows, self._share, self._is_training = SameRows(loader.dataset, seed), share, is_training
        self.source: Any = loader.dataset
        # A worker loads whole global batches: so a step has the rows of the same worker in every layout.
        self._loader: DataLoader[object] = DataLoader(
            self._rows, batch_size=share.num_rows, collate_fn=share, **{**settings, "generator": torch.Generator()}
        )

    def __iter__(self) -> Iterator[object]:
        """Give the micro batches of one pass; DataError: the ranks read different rows."""
        self._share.is_first = True
        for mark, micro_batches in self._loader:
            if mark is not None and dist.is_initialized() and len(set(gather_json(mark))) > 1:
                what = "the ranks read different rows, and each must read all of them in the same order"
                hint = "an IterableDataset that draws from torch, numpy or random; or a map-style dataset"
                raise DataError(what, where=type(self.source).__name__, hint=hint)
            yield from micro_batches

    def __len__(self) -> int:
        """Give the number of micro batches in a pass; TypeError: the rows have no length."""
        return -(-len(self.source) // self._share.num_rows) * self._share.num_microbatches

    def set_epoch(self, epoch: int) -> None:
        """Set which pass comes next; accelerate's loader calls it before each one."""
        self._rows.set_epoch(epoch if self._is_training else 0)


def as_it_is(batch: T) -> T:
    """Give a batch back: the collator of rows that are batches already."""
    return batch


def fingerprint(rows: Sequence[object]) -> str:
    """Give 16 hexadecimal digits that tell rows apart by their numbers and texts; other values do not count."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Mapping):
            for name in value:
                add(str(name))
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        elif isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (str, int, float, bool, np.generic)):
            digest.update(repr(value).encode())
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            digest.update(value.tobytes())

    add(rows)
    return digest.hexdigest()
