"""Micro batches of a stream, read ahead by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hfdist.data.order import workers_that_fit
from hfdist.errors import HfdistError, ResourceError

if TYPE_CHECKING:
    from hfdist.data.stream import TokenStream


class StreamLoader:
    """Iterate over micro batches of a stream: tensors of shape [micro_batch_size, sequence_length], int64.

    Never ends, so that ranks whose lanes end earlier keep in step with the others: a sequence of a lane that has come
    to its end has no targets. A batch without any, on all ranks, is the end of the data.
    """

    def __init__(self, stream: TokenStream, micro_batch_size: int) -> None:
        self.dataset = stream
        self._micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Start the workers; they end with the iterator."""
        config = self.dataset.config
        num_workers = workers_that_fit(config.workers, len(self.dataset.lanes))
        sequences = iter(
            DataLoader(
                _Worker(self.dataset),
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=config.prefetch if num_workers else None,
                collate_fn=as_it_is,
                # A generator of its own, so that dropout's random state is not touched.
                generator=torch.Generator(),
                multiprocessing_context="fork" if num_workers else None,
            )
        )
        try:
            while True:
                packed = []
                for _ in range(self._micro_batch_size):
                    item = next_item(sequences)
                    if isinstance(item, HfdistError):
                        raise item
                    packed.append(item)
                yield self.dataset.hand_out(packed)
        finally:
            # Ends the workers now: an error would hold them until garbage is collected, and that takes five seconds.
            del sequences


class _Worker(IterableDataset[Any]):
    """What runs in a loader process. Errors for the reader travel as values, since torch would wrap them."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        try:
            yield from self._stream.packed(worker, num_workers)
        except HfdistError as error:
            yield error


def next_item(items: Iterator[Any]) -> Any:
    """Take what loader processes made next.

    Raises:
        ResourceError: one of them has died.
    """
    try:
        return next(items)
    except RuntimeError as error:
        # torch has no class for it: `DataLoader worker (pid 1) is killed by signal` or `... exited unexpectedly`.
        if not str(error).startswith("DataLoader worker"):
            raise
        raise ResourceError(
            "a process that reads data ahead has died, often because memory ran out",
            where="data.workers",
            found=error,
            hint="more memory, a smaller data.prefetch, or data.workers=0",
        ) from error


def as_it_is(item: Any) -> Any:
    """Collate nothing: as they are, numpy arrays travel through a pipe, where tensors would each hold a file open."""
    return item
