"""Micro batches of a stream, read ahead by worker processes."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hfdist.config.data import DataConfig
from hfdist.data.order.shuffle import workers_that_fit
from hfdist.data.packing.sequence import Bundle, bundle, unbundle
from hfdist.data.stream.lane import Packed
from hfdist.data.stream.worker_deaths import Vitals
from hfdist.data.stream.worker_signals import forward_to_rank
from hfdist.errors import HfdistError

# Sequences that travel together: few at first, so that the first batch comes soon, then twice as many each time, since
# each item costs as much as many sequences.
_FIRST_TOGETHER, _MOST_TOGETHER = 8, 64
_SHOWN_LANES = 8

_Sent = tuple[list[tuple[int, int | None]], Bundle]
"""Lanes, pools and sequences of a worker."""
_Item = tuple[_Sent | None, HfdistError | None]


class Stream(Protocol):
    """What the loader asks of a stream; `TokenStream` says what each gives."""

    config: DataConfig

    @property
    def lanes(self) -> Sequence[int]:
        """Those of this data rank."""

    def lanes_of_worker(self, worker: int, num_workers: int) -> Iterable[int]:
        """Those that one worker reads."""

    def packed(self, worker: int, num_workers: int) -> Iterator[Packed]:
        """Sequences of one worker's lanes."""

    def next_batch(self, packed: list[Packed]) -> dict[str, torch.Tensor]:
        """Stack sequences to a micro batch."""


class StreamLoader:
    """Iterate over micro batches of a stream: tensors of shape [micro_batch_size, sequence_length], int64.

    Never ends, so that ranks whose lanes end earlier keep in step with the others: a sequence of a lane that has come
    to its end has no targets. The data end where `stream.has_ended` on all ranks: a batch without targets may
    also be of lanes that ended early, or of rows taken out.
    """

    def __init__(self, stream: Stream, micro_batch_size: int) -> None:
        self.dataset = stream
        self._micro_batch_size = micro_batch_size

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        """Start the workers; they end with the iterator."""
        sequences = self._sequences()
        try:
            while True:
                yield self.dataset.next_batch([next(sequences) for _ in range(self._micro_batch_size)])
        finally:
            # Ends the workers now: an error would hold them until garbage is collected, and that takes five seconds.
            sequences.close()

    def _sequences(self) -> Generator[Packed]:
        """All sequences of this data rank, in order."""
        config = self.dataset.config
        num_workers = workers_that_fit(config.workers, len(self.dataset.lanes))
        if num_workers == 0:
            yield from self.dataset.packed(0, 1)
        lanes = [sorted(self.dataset.lanes_of_worker(worker, num_workers)) for worker in range(num_workers)]
        vitals = Vitals(num_workers, lambda worker: f"which reads lanes {_shown(lanes[worker])}")
        loader = DataLoader(
            _Worker(self.dataset, vitals),
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=-(-config.prefetch // _most_together(config.prefetch)),
            collate_fn=keep_arrays,
            # A generator of its own, so that dropout's random state is not touched.
            generator=torch.Generator(),
            multiprocessing_context="fork",
        )
        items = iter(loader)
        try:
            with vitals.told():
                for num_together in _sizes(config.prefetch):
                    # Workers take turns sequence by sequence, and the items of each hold several.
                    turns = [_opened(next(items)) for _ in range(num_workers)]
                    for _ in range(num_together):
                        for turn in turns:
                            yield next(turn)
        finally:
            del items


class _Worker(IterableDataset[Any]):
    """What runs in a loader process: gives sequences together, since each item costs as much as several sequences.

    Errors for the reader travel as values, since torch would wrap them.
    """

    def __init__(self, stream: Stream, vitals: Vitals) -> None:
        self._stream, self._vitals = stream, vitals

    def __iter__(self) -> Iterator[_Item]:
        info = get_worker_info()
        assert info is not None
        forward_to_rank(each_second=lambda: self._vitals.note(info.id))
        # What is inherited is no garbage: looking through it takes tenths of a second, and copies its memory.
        gc.freeze()
        together: list[Packed] = []
        sequences = self._stream.packed(info.id, info.num_workers)
        try:
            for num_together in _sizes(self._stream.config.prefetch):
                together = []
                for _ in range(num_together):
                    together.append(next(sequences))
                self._vitals.note(info.id)
                yield _closed(together), None
        except HfdistError as error:
            yield _closed(together) if together else None, error


def _most_together(prefetch: int) -> int:
    """No more than half of what is read ahead, so that one item is made while another is used."""
    return min(max(prefetch // 2, _FIRST_TOGETHER), _MOST_TOGETHER)


def _sizes(prefetch: int) -> Iterator[int]:
    """How many sequences each item of a worker holds; without end."""
    size, most = _FIRST_TOGETHER, _most_together(prefetch)
    while True:
        yield size
        size = min(2 * size, most)


def _closed(together: list[Packed]) -> _Sent:
    """Tokens alone travel, in their narrow type: the rank makes positions and labels of them."""
    return [(lane, pool) for lane, pool, _ in together], bundle([sequence for _, _, sequence in together])


def _opened(item: _Item) -> Iterator[Packed]:
    """Give what a worker sent.

    Raises:
        HfdistError: where the worker met it.
    """
    sent, error = item
    if sent is not None:
        for (lane, pool), sequence in zip(sent[0], unbundle(sent[1]), strict=True):
            yield lane, pool, sequence
    if error is not None:
        raise error


def _shown(lanes: list[int]) -> str:
    return ", ".join([*map(str, lanes[:_SHOWN_LANES]), *(["..."] if len(lanes) > _SHOWN_LANES else [])])


def keep_arrays(item: Any) -> Any:
    """Collate nothing: as they are, numpy arrays travel through a pipe, where tensors would each hold a file open."""
    return item
