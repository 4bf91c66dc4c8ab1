"""Saving beside the training: it waits for a copy of this rank's share in memory, and not for the disk."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hfdist.checkpoint.folder import Keep, prune
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.save_plan import MODEL_STEM, Planner
from hfdist.checkpoint.write import PreparedSave, complete, prepare
from hfdist.collectives import on_all_ranks, on_rank_zero, world_size

_LAST_SECONDS = 3.0
"""For a save at the end of a process that has failed. A thread that comes back from gloo, whose peers may end as well,
while the interpreter ends would abort the process."""

_ALIGNMENT_BYTES = 64

_Job = Callable[[], None]


@dataclass(frozen=True)
class SaveReport:
    """A save that has ended well."""

    path: Path
    step: int
    num_bytes: int
    """Of the tensor files of all ranks."""
    stall_seconds: float
    """For which training stood still, as long as a save before was not done included."""
    total_seconds: float
    """From the wish to save until the checkpoint had its name."""


class _HostCopy:
    """Memory of the host where a save keeps what training is about to change. Made once: new memory is slow."""

    def __init__(self) -> None:
        self._layout: list[tuple[int, torch.dtype]] = []
        """Bytes and type of each copy."""
        self._copies: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def take(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy 1-D tensors, in one buffer. The copies before are gone."""
        layout = [(elements.nbytes, elements.dtype) for elements in live]
        if layout != self._layout:
            # Freed first: two would not always fit.
            self._layout, self._copies = [], []
            self._copies = _allocate(layout)
            self._layout = layout
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        # A device copies what the steps so far have left. Only that is awaited: not what communicates beside.
        with torch.cuda.stream(self._stream):
            for copy, elements in zip(self._copies, live, strict=True):
                copy.copy_(elements, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies


def _allocate(layout: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Views of one new buffer."""
    sizes = [-(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for num_bytes, _ in layout]
    # Page-locked, so that a device copies at full speed.
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [part[:num_bytes].view(dtype) for part, (num_bytes, dtype) in zip(buffer.split(sizes), layout, strict=True)]


class Saver:
    """Writes one checkpoint at a time, in a thread that speaks with those of the other ranks in a group of their own.

    Make it on all ranks: that is a collective.

    Args:
        in_background: False: training waits until all is on the disk, and no memory for a copy is needed.
        stem: of the files of weights, as of `Planner`.
        write_first: called on every rank in each save before anything else is written, while training may go on.
    """

    def __init__(
        self,
        *,
        in_background: bool = True,
        stem: str = MODEL_STEM,
        write_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._write_first = write_first
        self._planner = Planner(stem=stem)
        self._copy = _HostCopy() if in_background else None
        self._group = dist.new_group(backend="gloo") if in_background and world_size() > 1 else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_done = threading.Event()
        self._is_done.set()
        # One for all saves: a new one may allocate in another arena of the C library, which keeps what is freed there.
        # A daemon: a process that fails ends soon, and what has no name by then is no checkpoint.
        self._thread = threading.Thread(target=_do_all, args=(self._jobs, self._is_done), name="save", daemon=True)
        self._error: Exception | None = None
        self._reports: deque[SaveReport] = deque()
        weakref.finalize(self, self._jobs.put, None)
        atexit.register(_end_soon, weakref.ref(self))

    def save(
        self,
        path: Path,
        *,
        step: int,
        pieces: Iterable[Piece],
        state: dict[str, Any],
        write_model_files: Callable[[Path], object],
        keep: Keep | None,
        begin_seconds: float,
    ) -> None:
        """Write the checkpoint `path`, then remove what `keep` does not name. A collective.

        Args:
            path: in the run's folder of checkpoints, with a name that `folder.STEP_NAME` matches.
            step: as of `prepare`.
            pieces: as there.
            state: as there.
            write_model_files: as there; may be called while training goes on.
            keep: which checkpoints stay; None: all.
            begin_seconds: when training began to stand still, by `time.monotonic`.

        Raises:
            CheckpointError, NumericsError, ResourceError: now, or at the next `wait`; of this save or of the last.
        """
        self.wait()
        prepared = prepare(self._planner, path, step, pieces, state, write_model_files)
        if self._copy is None:
            self._complete(prepared, keep, begin_seconds)
            self.wait()
            return
        prepared = replace(prepared, elements=self._copy.take(prepared.elements))
        stall_seconds = time.monotonic() - begin_seconds
        if self._thread.ident is None:
            self._thread.start()
        self._is_done.clear()
        self._jobs.put(partial(self._complete, prepared, keep, begin_seconds, stall_seconds))

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise what this rank knows of already."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until nothing is being saved. Call on all ranks, which then all raise alike.

        Raises:
            CheckpointError, NumericsError, ResourceError: the save has failed.
        """
        self._is_done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_reports(self) -> list[SaveReport]:
        """Give the reports of the saves that have ended since the last call, the oldest first."""
        # The thread may add one meanwhile.
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _complete(
        self, prepared: PreparedSave, keep: Keep | None, begin_seconds: float, stall_seconds: float | None = None
    ) -> None:
        try:
            on_all_ranks(self._write_first, self._group)
            complete(prepared, self._group)
            if keep is not None:
                # Awaited by all: a rank that ends takes the others along under most launchers.
                on_rank_zero(partial(prune, prepared.final.parent, keep), self._group)
        except Exception as error:
            self._error = error
            return
        total_seconds = time.monotonic() - begin_seconds
        stalled = total_seconds if stall_seconds is None else stall_seconds
        self._reports.append(SaveReport(prepared.final, prepared.step, prepared.plan.num_bytes, stalled, total_seconds))


def _do_all(jobs: SimpleQueue[_Job | None], is_done: threading.Event) -> None:
    """Hold nothing between two jobs: neither what the last has saved, nor the `Saver`, whose end puts None."""
    while (job := jobs.get()) is not None:
        try:
            job()
        finally:
            del job
            is_done.set()


def _end_soon(of_saver: weakref.ref[Saver]) -> None:
    saver = of_saver()
    if saver is not None and saver._thread.is_alive():
        saver._jobs.put(None)
        saver._thread.join(_LAST_SECONDS)
