"""Interleaved repeats: a busy spell of a shared machine hits all contenders alike, and each follows each."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil


def interleave(
    contenders: Mapping[str, Callable[[], float]], num_rounds: int, *, num_warm_up: int = 1
) -> dict[str, list[float]]:
    """Call all in each round, each time beginning with the next; what is warming up does not count."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(num_warm_up + num_rounds):
        for name in names:
            figure = contenders[name]()
            if turn >= num_warm_up:
                figures[name].append(figure)
        names = [*names[1:], names[0]]
    return figures


def medians(figures: Mapping[str, list[float]]) -> dict[str, float]:
    """Of each contender."""
    return {name: statistics.median(values) for name, values in figures.items()}


def cpu_seconds() -> float:
    """Of this process and its threads, of its children, and of those that have ended. Takes a millisecond."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    own = os.times()
    return total + own.user + own.system + own.children_user + own.children_system
