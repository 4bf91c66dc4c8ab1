"""Loader processes, which read and tokenize sequences ahead of their rank, and send many of them as a few arrays.

worker 0      a0 a1 a2 a3 | a4 ...       an item holds several sequences of one worker
worker 1      b0 b1 b2 b3 | b4 ...
the rank      a0 b0 a1 b1 a2 b2 ...      workers take turns, sequence by sequence
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, join
from hfdist.data.packing.sequence import PackedSequence, PieceImages, Pieces, Problem
from hfdist.data.stream.bytes_ahead import BytesAhead
from hfdist.data.stream.lane import LaneSequence
from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_process import forward_to_rank, keep_arrays
from hfdist.errors import HfdistError
from hfdist.units import list_first

# Sequences in the first item of a worker and in the largest. To send an item costs as much as many sequences. The first
# one is small, so that the first batch comes soon, and each one has twice as many as the one before.
_FIRST_ITEM, _LARGEST_ITEM = 8, 64


class _Rest(NamedTuple):
    """All fields of a packed sequence but its tokens and its records, under the same names."""

    lengths: Sequence[int]
    blanks: Sequence[tuple[int, int]]
    next_place: Place
    num_tokens: int
    num_documents: int
    problems: tuple[Problem, ...]
    images: Mapping[int, PieceImages] | None


class _Bundle(NamedTuple):
    """Sequences with their lanes and pools, in a form that is cheap to send: one array for all of a kind."""

    turns: list[tuple[int, int | None]]
    """Lane and pool of each sequence, as in `LaneSequence`."""
    tokens: NDArray[np.integer]
    """Tokens of all sequences, end to end, in their narrow type: the rank makes positions and labels of them."""
    records: Records
    """Records of all sequences, end to end."""
    num_records: list[int]
    """Number of records of each sequence."""
    rests: list[_Rest]
    """The other fields of each sequence."""


class _Item(NamedTuple):
    """What a worker sends at a time."""

    bundle: _Bundle | None
    """Sequences; None: there were none before the error."""
    error: HfdistError | None
    """The error that the worker met after these sequences; None: it met none."""


_Open = Callable[[int, int], Iterator[LaneSequence]]
"""Gives the sequences of a worker, by its number and the number of workers."""


def read_ahead(
    open_sequences: _Open, lanes: Sequence[Sequence[int]], prefetch: int, *, one_by_one: bool, most_image_bytes: int
) -> Generator[LaneSequence]:
    """Give sequences that workers take turns to read.

    Args:
        open_sequences: gives the sequences of a worker, by its number and the number of workers; runs in its process.
        lanes: the lanes of each worker, which messages name.
        prefetch: the number of sequences that each worker holds ready.
        one_by_one: whether each sequence is sent as soon as it is made, which sequences with images need.
        most_image_bytes: the most bytes of images that a worker holds ready; without images, no worker waits for it.

    Raises:
        HfdistError: an error that a worker met, raised at its turn; or a worker has died.
    """
    num_workers, rank = len(lanes), os.getpid()
    registry = WorkerRegistry(num_workers, lambda worker: f"which reads lanes {list_first(lanes[worker], 8)}")

    def start_worker(worker: int) -> None:
        forward_to_rank(rank, each_second=lambda: registry.note(worker))
        # Inherited objects are no garbage: looking through them takes tenths of a second, and copies their memory.
        gc.freeze()

    ahead = BytesAhead(num_workers, most_image_bytes)
    # An item has at most half of what is read ahead, so that one is made while another is used.
    most_in_item = 1 if one_by_one else min(max(prefetch // 2, _FIRST_ITEM), _LARGEST_ITEM)
    loader = DataLoader(
        _Worker(open_sequences, most_in_item, ahead),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=-(-prefetch // most_in_item),
        collate_fn=keep_arrays,
        worker_init_fn=start_worker,
        # A generator of its own, so that dropout's random state is not touched.
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    items = iter(loader)
    try:
        with registry.explain_deaths():
            for item_size in _item_sizes(most_in_item):
                # Workers take turns sequence by sequence, and an item holds several sequences.
                turns = [_unpack(next(items)) for _ in range(num_workers)]
                for _ in range(item_size):
                    for worker, turn in enumerate(turns):
                        packed = next(turn)
                        ahead.take(worker, packed.sequence)
                        yield packed
    finally:
        ahead.close()
        # Ends the workers now: an error would hold them until garbage is collected.
        del items


class _Worker(IterableDataset[object]):
    """The dataset in a loader process. Errors for the reader travel as values, since torch would wrap them."""

    def __init__(self, open_sequences: _Open, most_in_item: int, ahead: BytesAhead) -> None:
        self._open, self._most_in_item, self._ahead = open_sequences, most_in_item, ahead

    def __iter__(self) -> Iterator[_Item]:
        info = get_worker_info()
        assert info is not None
        item: list[LaneSequence] = []
        sequences = self._open(info.id, info.num_workers)
        try:
            for item_size in _item_sizes(self._most_in_item):
                item = []
                for _ in range(item_size):
                    self._ahead.wait(info.id)
                    item.append(next(sequences))
                    self._ahead.add(item[-1].sequence)
                yield _Item(_bundle(item), error=None)
        except HfdistError as error:
            yield _Item(_bundle(item) if item else None, error)


def _item_sizes(most: int) -> Iterator[int]:
    """Give the number of sequences in each item: twice as many each time, at most `most`."""
    size = min(_FIRST_ITEM, most)
    while True:
        yield size
        size = min(2 * size, most)


def _unpack(item: _Item) -> Iterator[LaneSequence]:
    """Give the sequences of an item, then raise its error, if it has one."""
    if item.bundle is not None:
        yield from _unbundle(item.bundle)
    if item.error is not None:
        raise item.error


def _bundle(item: Sequence[LaneSequence]) -> _Bundle:
    """Make a bundle of sequences, one or more; their tokens and records are copied."""
    sequences = [packed.sequence for packed in item]
    return _Bundle(
        turns=[(packed.lane, packed.pool) for packed in item],
        tokens=Pieces.of(sequences).tokens,
        records=join([sequence.records for sequence in sequences]),
        num_records=[len(sequence.records) for sequence in sequences],
        rests=[_Rest._make(_GET_REST(sequence)) for sequence in sequences],
    )


_GET_REST = attrgetter(*_Rest._fields)


def _unbundle(bundle: _Bundle) -> Iterator[LaneSequence]:
    """Give the sequences of a bundle, whose tokens and records are views of the bundle's."""
    first_token, first_record = 0, 0
    for (lane, pool), num_records, rest in zip(bundle.turns, bundle.num_records, bundle.rests, strict=True):
        next_token, next_record = first_token + sum(rest.lengths), first_record + num_records
        tokens = bundle.tokens[first_token:next_token]
        records = bundle.records[first_record:next_record]
        yield LaneSequence(lane, pool, PackedSequence(parts=[tokens], records=records, **rest._asdict()))
        first_token, first_record = next_token, next_record
