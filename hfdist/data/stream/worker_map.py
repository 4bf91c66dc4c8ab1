"""The values of a function for the numbers 0, 1, 2, ..., worked out by forked processes and given in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, get_worker_info

from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_process import keep_arrays
from hfdist.errors import HfdistError

_Value = TypeVar("_Value")


def map_in_workers(
    function: Callable[[int], _Value], count: int, registry: WorkerRegistry, *, ahead: int = 2
) -> Iterator[_Value]:
    """Give the values `function(0)` to `function(count - 1)`, in order.

    Args:
        function: runs in the processes; may raise an HfdistError, which is raised here in its turn.
        count: the number of values.
        registry: says how many processes there are; with 0 of them, this process runs the function.
        ahead: the most values that each process works out before they are asked for.

    Raises:
        ResourceError: a process has died.
    """
    workers = registry.num_workers
    loader = DataLoader(
        _Values(function, count, registry),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
        collate_fn=keep_arrays,
        worker_init_fn=_keep_to_one_thread,
        multiprocessing_context="fork" if workers else None,
    )
    values = iter(loader)
    try:
        with registry.explain_deaths():
            for value in values:
                if isinstance(value, HfdistError):
                    raise value
                yield value
    finally:
        # Ends the processes now: an error would hold them until garbage is collected, and that takes five seconds.
        del values


def _keep_to_one_thread(worker: int) -> None:
    """Keep the tokenizer of a worker, whose number torch passes, to one thread."""
    # The processes are the parallelism, and threads of a tokenizer do not outlive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class _Values(Dataset[object], Generic[_Value]):
    """The values as a dataset of torch, which a worker process works out. Errors are values: torch would wrap them."""

    def __init__(self, function: Callable[[int], _Value], count: int, registry: WorkerRegistry) -> None:
        self._function, self._count, self._registry = function, count, registry

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> _Value | HfdistError:
        if (info := get_worker_info()) is not None:
            self._registry.note(info.id)
        try:
            return self._function(number)
        except HfdistError as error:
            return error
