"""A `map` in several threads, for many items that each wait for a disk or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 16
_CHUNKS_A_THREAD, _LARGEST_CHUNK = 8, 16
"""Items go to the threads in chunks: to pass one on costs as much as to open a local file."""


def thread_map(function: Callable[..., T], *columns: Sequence[object], least_chunk: int = 1) -> Iterator[T]:
    """Call `function` for each item as `map` does, in 16 threads; give the results in order, or raise what it raises.

    `columns` are the arguments, one sequence for each. A thread takes at least `least_chunk` items at a time: several
    of quick ones, since it takes longer to start, on a busy machine milliseconds; and so few items need no thread. Who
    takes no more results need not wait for calls that have begun: these end by themselves, and no other one begins.
    """
    is_over = threading.Event()

    def run(chunk: Sequence[tuple[object, ...]]) -> list[T]:
        # An error does not wait for whole chunks, which may be files to fetch.
        return [function(*item) for item in chunk if not is_over.is_set()]

    items = list(zip(*columns, strict=True))
    length = max(min(len(items) // (_THREADS * _CHUNKS_A_THREAD), _LARGEST_CHUNK), least_chunk)
    if len(items) <= length:
        yield from map(function, *columns)
        return
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for results in pool.map(run, (items[start : start + length] for start in range(0, len(items), length))):
            yield from results
    finally:
        is_over.set()
        # It does not wait: after an error, the garbage collector may come here in one of these threads.
        pool.shutdown(wait=False, cancel_futures=True)
