"""Iteration with random numbers that depend on a seed alone: what a rank has drawn before changes no order of rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler, get_worker_info

T = TypeVar("T")


class _States(NamedTuple):
    """States of the generators that a program draws from."""

    python: tuple[object, ...]
    numpy: Any
    torch: torch.Tensor


def drawing_from(seed: int, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Give the items of `begin()`; what it draws from `random`, numpy and torch (on the CPU) begins at this seed.

    Between two items the program draws on as if `begin()` had drawn nothing: the generators' states are exchanged.
    """
    inner: _States | None = None
    items: Iterator[T] | None = None
    while True:
        outer = _states()
        try:
            if inner is None or items is None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed)
                items = begin()
            else:
                _restore(inner)
            item = next(items)
            inner = _states()
        except StopIteration:
            return
        finally:
            _restore(outer)
        yield item


def _states() -> _States:
    return _States(random.getstate(), np.random.get_state(), torch.default_generator.get_state())


def _restore(states: _States) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.default_generator.set_state(states.torch)


class SameOrder(Sampler[T]):
    """A sampler whose order depends on the data's seed and the epoch alone: on all ranks the same."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._epoch = 0

    def __iter__(self) -> Iterator[T]:
        return drawing_from(self._seed + self._epoch, lambda: iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set which pass comes next; accelerate's loader calls it before each one."""
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def same_on_all_ranks(sampler: Sampler[T], seed: int, *, is_seeded: bool) -> Sampler[T]:
    """Give a sampler that draws the same on all ranks; `is_seeded`: accelerate seeds those of its own kind."""
    draws_nothing = type(sampler) is SequentialSampler or getattr(sampler, "generator", None) is not None
    if draws_nothing or (is_seeded and isinstance(sampler, RandomSampler)):
        return sampler
    return SameOrder(sampler, seed)


class SameRows(IterableDataset[object]):
    """Rows of an IterableDataset; what it draws depends on the data's seed, the epoch and the worker alone."""

    def __init__(self, rows: Any, seed: int) -> None:
        self._rows, self._seed = rows, seed
        # In shared memory: a worker that stays from pass to pass has copies, and would not see another epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[object]:
        worker, epoch = get_worker_info(), int(self._epoch)
        if worker is not None and hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)
        seed = self._seed + epoch
        if worker is not None:
            # A large prime: the seeds of two workers meet in no epoch.
            seed += 1_000_003 * (worker.id + 1)
        return drawing_from(seed, lambda: iter(self._rows))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have another order, if the rows have one."""
        self._epoch.fill_(epoch)
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)
