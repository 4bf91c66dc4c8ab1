"""Many files at once: most of the time is spent on waiting for disks and networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = 16
_TURNS = 8
"""Of each thread: enough that none waits long for a slow one, since a turn costs as much as opening a local file."""


def thread_map(function: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
    """Give what `function` gives for each item, in order, as `map` does; what it raises is raised at its place."""

    def take_turn(items: Sequence[tuple[Any, ...]]) -> list[tuple[T | None, Exception | None]]:
        results: list[tuple[T | None, Exception | None]] = []
        for item in items:
            if is_over.is_set():
                break
            try:
                results.append((function(*item), None))
            except Exception as error:
                return [*results, (None, error)]
        return results

    is_over = threading.Event()
    items = list(zip(*columns, strict=True))
    length = max(len(items) // (_THREADS * _TURNS), 1)
    turns = [items[start : start + length] for start in range(0, len(items), length)]
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for results in pool.map(take_turn, turns):
                for value, error in results:
                    if error is not None:
                        raise error
                    yield value  # type: ignore[misc]  # only with an error there is none
        finally:
            # Else an error would wait for all turns that have begun.
            is_over.set()
