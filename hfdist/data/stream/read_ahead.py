"""Loader processes: they read and tokenize sequences ahead of their rank, and send them in few arrays."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, join
from hfdist.data.packing.sequence import PieceImages, Pieces, Problem
from hfdist.data.packing.sequence import Sequence as PackedSequence
from hfdist.data.stream.bytes_ahead import BytesAhead
from hfdist.data.stream.lane import LaneSequence
from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_process import forward_to_rank, keep_arrays
from hfdist.errors import HfdistError
from hfdist.units import list_first

# Sequences in an item of a worker, which costs as much as many sequences: few at first, so that the first batch comes
# soon, then twice as many each time.
_FIRST_ITEM, _LARGEST_ITEM = 8, 64

_Images = Mapping[int, PieceImages] | None
_Rest = tuple[Sequence[int], Sequence[tuple[int, int]], tuple[int, ...], int, int, tuple[Problem, ...], _Images]
"""`lengths`, `blanks`, `next_place`, `num_tokens`, `num_documents`, `problems` and `images` of a sequence."""


class _Bundle(NamedTuple):
    """Sequences with their lanes and pools."""

    turns: list[tuple[int, int | None]]
    """Lane and pool of each sequence, as in `LaneSequence`."""
    tokens: NDArray[np.integer]
    """Tokens of all sequences, end to end, in their narrow type: the rank makes positions and labels of them."""
    records: Records
    """Records of all, end to end."""
    num_records: list[int]
    rests: list[_Rest]


_Item = tuple[_Bundle | None, HfdistError | None]
"""Sequences of a worker, and what it met after them."""
_Open = Callable[[int, int], Iterator[LaneSequence]]


def read_ahead(
    open_sequences: _Open, lanes: Sequence[Sequence[int]], prefetch: int, *, one_by_one: bool, most_image_bytes: int
) -> Generator[LaneSequence]:
    """Give sequences that workers take turns to read.

    Args:
        open_sequences: gives those of a worker, by its number and the number of workers, in its process.
        lanes: lanes of each worker, for messages.
        prefetch: sequences that each worker holds ready.
        one_by_one: whether a sequence is sent once it is made, as each with images must be.
        most_image_bytes: limit of `BytesAhead`; sequences without images have no bytes there, and nobody waits.

    Raises:
        HfdistError: what a worker met, in its turn; a worker that has died.
    """
    num_workers, rank = len(lanes), os.getpid()
    registry = WorkerRegistry(num_workers, lambda worker: f"which reads lanes {list_first(lanes[worker], 8)}")

    def begin(worker: int) -> None:
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
        worker_init_fn=begin,
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
                yield _bundle(item), None
        except HfdistError as error:
            yield _bundle(item) if item else None, error


def _item_sizes(most: int) -> Iterator[int]:
    size = min(_FIRST_ITEM, most)
    while True:
        yield size
        size = min(2 * size, most)


def _unpack(item: _Item) -> Iterator[LaneSequence]:
    """Give what a worker sent; raises its error where the worker met it."""
    sent, error = item
    if sent is not None:
        yield from _unbundle(sent)
    if error is not None:
        raise error


def _bundle(item: Sequence[LaneSequence]) -> _Bundle:
    """Copy the tokens and the records of sequences, one or more."""
    sequences = [packed.sequence for packed in item]
    return _Bundle(
        [(lane, pool) for lane, pool, _ in item],
        Pieces.of(sequences).tokens,
        join([one.records for one in sequences]),
        [len(one.records) for one in sequences],
        list(map(_rest, sequences)),
    )


def _rest(one: PackedSequence) -> _Rest:
    return one.lengths, one.blanks, tuple(one.next_place), one.num_tokens, one.num_documents, one.problems, one.images


def _unbundle(given: _Bundle) -> Iterator[LaneSequence]:
    """Give the sequences of a bundle."""
    token, record = 0, 0
    for (lane, pool), num_records, rest in zip(given.turns, given.num_records, given.rests, strict=True):
        lengths, blanks, place, num_tokens, num_documents, problems, images = rest
        stop, last = token + sum(lengths), record + num_records
        parts, records = [given.tokens[token:stop]], given.records[record:last]
        own = parts, lengths, blanks, Place._make(place), num_tokens, num_documents, records
        yield LaneSequence(lane, pool, PackedSequence(*own, problems, images))
        token, record = stop, last
