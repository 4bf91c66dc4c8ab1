"""Interleaved repeats: a busy spell of a shared machine hits all contenders alike, and each follows each."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from benchmarks.overlay import UnavailableError

T = TypeVar("T")
Figures = TypeVar("Figures", bound=tuple[float, ...])


def interleave(
    contenders: Mapping[str, Callable[[], T]], num_rounds: int, *, num_warm_up: int = 1
) -> dict[str, list[T]]:
    """Call all in each round, each time beginning with the next; what is warming up does not count."""
    figures: dict[str, list[T]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(num_warm_up + num_rounds):
        for name in names:
            figure = contenders[name]()
            if turn >= num_warm_up:
                figures[name].append(figure)
        names = [*names[1:], names[0]]
    return figures


def medians_or_reasons(
    contenders: Mapping[str, Callable[[], float]], num_rounds: int, *, num_warm_up: int = 1
) -> dict[str, float | str]:
    """Medians of `interleave`; of one that raises an `UnavailableError` at any turn, its message."""
    reasons: dict[str, str] = {}

    def guarded(name: str) -> Callable[[], float]:
        def run() -> float:
            if name not in reasons:
                try:
                    return contenders[name]()
                except UnavailableError as error:
                    reasons[name] = str(error)
            return math.nan

        return run

    figures = interleave({name: guarded(name) for name in contenders}, num_rounds, num_warm_up=num_warm_up)
    return {**medians(figures), **reasons}


def medians(figures: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of the figures of each contender."""
    return {name: statistics.median(values) for name, values in figures.items()}


def median_fields(turns: Sequence[Figures]) -> Figures:
    """Median of each field of named tuples."""
    make: Any = type(turns[0])
    made: Figures = make(*map(statistics.median, zip(*turns, strict=True)))
    return made


def cpu_seconds_of(run: Callable[[], object]) -> float:
    """CPU time of a call in this process, its threads and its children; without the millisecond that looking takes."""
    begin_children = _children_seconds()
    begin = time.process_time()
    run()
    own = time.process_time() - begin
    return own + _children_seconds() - begin_children


def _children_seconds() -> float:
    """CPU seconds of the children that live, and of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
