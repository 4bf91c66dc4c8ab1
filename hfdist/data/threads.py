"""A `map` in 16 threads, for many items that each wait for a disk or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 16
_CHUNKS_A_THREAD, _LARGEST_CHUNK = 8, 16
"""Chunks for each thread, and items of the largest chunk: to pass on an item alone costs as much as to open a file."""


def thread_map(function: Callable[..., T], *columns: Sequence[object], least_chunk: int = 1) -> Iterator[T]:
    """Call `function` for each item as `map` does, in 16 threads; give the results in order, or raise its error.

    `columns` are sequences of the arguments, as `map` takes them. A thread takes at least `least_chunk` items at a
    time, and with no more items there are no threads: where calls are quick, a thread takes longer to start. A caller
    that takes no more results need not wait: calls that have begun end by themselves, and no other call begins.
    """
    is_over = threading.Event()

    def run(chunk: Sequence[tuple[object, ...]]) -> list[T]:
        # After an error, not even the rest of a chunk is run: its items may be files to fetch.
        return [function(*item) for item in chunk if not is_over.is_set()]

    items = list(zip(*columns, strict=True))
    chunk_size = max(min(len(items) // (_THREADS * _CHUNKS_A_THREAD), _LARGEST_CHUNK), least_chunk)
    if len(items) <= chunk_size:
        yield from map(function, *columns)
        return
    chunks = [items[start : start + chunk_size] for start in range(0, len(items), chunk_size)]
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for results in pool.map(run, chunks):
            yield from results
    finally:
        is_over.set()
        # No wait: after an error, the garbage collector may run this in one of the pool's own threads.
        pool.shutdown(wait=False, cancel_futures=True)
