"""Many files at once: most of the time is spent on waiting for disks and networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = 16
# Passing a chunk to a thread costs as much as opening a local file.
_CHUNKS_A_THREAD, _LARGEST_CHUNK = 8, 16


def thread_map(function: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
    """Give what `function` gives for each item, in order, as `map` does; what it raises is raised at its place."""
    is_over = threading.Event()

    def run(chunk: Sequence[tuple[Any, ...]]) -> tuple[list[T], Exception | None]:
        results: list[T] = []
        try:
            for item in chunk:
                if is_over.is_set():  # Else an error would wait for all chunks that have begun.
                    break
                results.append(function(*item))
        except Exception as error:
            return results, error
        return results, None

    items = list(zip(*columns, strict=True))
    length = min(max(len(items) // (_THREADS * _CHUNKS_A_THREAD), 1), _LARGEST_CHUNK)
    chunks = [items[start : start + length] for start in range(0, len(items), length)]
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for results, error in pool.map(run, chunks):
                yield from results
                if error is not None:
                    raise error
        finally:
            is_over.set()
