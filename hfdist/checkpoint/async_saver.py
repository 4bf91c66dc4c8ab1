"""Saving beside the training: it waits for a copy of this rank's share in memory, and not for the disk."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from hfdist.checkpoint.folder import Keep, commit, prune, remove_unfinished, temporary
from hfdist.checkpoint.manifest import FORMAT, Part, write_json
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.random_state import RandomState
from hfdist.checkpoint.replicas import Replicas
from hfdist.checkpoint.save_plan import MODEL_STEM, STATE_FILE, Planner, numbers_as_json
from hfdist.checkpoint.write import Contents, write_folder
from hfdist.collectives import on_all_ranks, on_rank_zero, rank, world_size
from hfdist.control_group import ControlGroup
from hfdist.errors import CheckpointError, ResourceError
from hfdist.models.names.hub_names import HubNames

logger = logging.getLogger(__name__)

_LAST_SECONDS = 3.0
"""Seconds that a save has at the end of a process that has failed.

A thread that comes back from gloo, whose peers may end as well, while the interpreter ends would abort the process.
"""

_ALIGNMENT_BYTES = 64

_Job = Callable[[], None]
_WriteFiles = Callable[[Path, bool], object]


class SaveReport(NamedTuple):
    """A save that has ended well."""

    path: Path
    step: int
    num_bytes: int
    """Bytes of the tensor files of all ranks."""
    stall_seconds: float
    """Seconds for which training stood still; the wait for a save before that was not done is included."""
    total_seconds: float
    """Seconds from the begin of the save until the checkpoint had its name."""
    is_replica: bool = False
    """Whether it is in memory, and not on the disk."""


class _HostCopy:
    """Memory of the host where a save keeps what training is about to change. Made once: new memory is slow."""

    def __init__(self) -> None:
        self._layout: list[tuple[int, torch.dtype]] = []
        """Bytes and type of each copy."""
        self._copies: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def reserve(self, layout: Sequence[tuple[int, torch.dtype]]) -> None:
        """Make the memory for copies of so many bytes and such types beforehand."""
        self._make(layout)
        if self._stream is None:
            for copy in self._copies:
                # Else the system gives each page when it is first written, while training stands still.
                copy.zero_()

    def _make(self, layout: Sequence[tuple[int, torch.dtype]]) -> None:
        """Make the memory, unless it is there."""
        if layout == self._layout:
            return
        # Freed first: two would not always fit.
        self._layout, self._copies = [], []
        # On the device of this rank, in another thread too.
        with torch.cuda.stream(self._stream):
            self._copies = _allocate(layout)
        self._layout = list(layout)

    def take(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, flattened, in one buffer. The copies before are gone."""
        self._make(_layout_of(live))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        # A device copies what the steps so far have left. Only that is awaited: not what communicates beside.
        with torch.cuda.stream(self._stream):
            for copy, elements in zip(self._copies, live, strict=True):
                copy.view(elements.shape).copy_(elements, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies


def _layout_of(live: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(elements.nbytes, elements.dtype) for elements in live]


def _allocate(layout: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Give views of one new buffer."""
    sizes = [-(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for num_bytes, _ in layout]
    # Page-locked, so that a device copies at full speed.
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [part[:num_bytes].view(dtype) for part, (num_bytes, dtype) in zip(buffer.split(sizes), layout, strict=True)]


class Saver:
    """Writes one checkpoint at a time, in a thread that speaks with those of the other ranks in a group of their own.

    Make it on all ranks: that is a collective.

    Args:
        in_background: False: training waits until all is on the disk, and no memory for a copy is needed.
        stem, names: of the files of weights, as of `Planner`.
        write_first: called on every rank in each save before anything else is written, while training may go on.
        replicas: where each save leaves one, too, before it writes to the disk; None: nowhere.
    """

    def __init__(
        self,
        *,
        in_background: bool = True,
        stem: str = MODEL_STEM,
        names: HubNames | None = None,
        write_first: Callable[[], None] = lambda: None,
        replicas: Replicas | None = None,
    ) -> None:
        self._write_first = write_first
        self.replicas = replicas
        """Where each save leaves a replica; None: nowhere, or not any more, as the memory has become full."""
        self._planner = Planner(stem=stem, names=names)
        self._copy = _HostCopy() if in_background else None
        self._group = ControlGroup() if in_background and world_size() > 1 else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_done = threading.Event()
        self._is_done.set()
        self._is_reserving = False
        """Whether the last job is no save."""
        # One for all saves: a new one may allocate in another arena of the C library, which keeps what is freed there.
        # A daemon: a process that fails ends soon, and what has no name by then is no checkpoint.
        self._thread = threading.Thread(target=_do_all, args=(self._jobs, self._is_done), name="save", daemon=True)
        self._error: BaseException | None = None
        self._reports: deque[SaveReport] = deque()
        weakref.finalize(self, self._jobs.put, None)
        atexit.register(_end_soon, weakref.ref(self))

    def prepare(self, pieces: Iterable[Piece]) -> None:
        """Make the plan, and the memory for copies in the thread, so that the first save need not. A collective.

        Page-locked memory takes longer than a step. Where there is too little, the save itself says so.
        """
        if self._copy is not None:
            self.wait()
            _, elements, _ = self._planner.plan(pieces)
            self._begin(partial(_reserve, self._copy, _layout_of(elements)), is_reserving=True)

    def save(
        self,
        path: Path | None,
        *,
        step: int,
        pieces: Iterable[Piece],
        state: Mapping[str, object],
        write_files: _WriteFiles = lambda folder, is_replica: None,
        keep: Keep | None = None,
        begin_seconds: float,
    ) -> None:
        """Write the checkpoint `path`, then remove what `keep` does not name. A collective.

        Args:
            path: in the run's folder of checkpoints, with a name that `folder.STEP_NAME` matches; None: no
                checkpoint, and a replica alone.
            step: optimizer steps done.
            pieces: what this rank holds.
            state: JSON values that `read_checkpoint` gives back; rank 0's is written.
            write_files: called with a folder and whether it is a replica, on rank 0, and maybe while training goes on;
                writes what goes with the tensors. A replica needs only what a start does.
            keep: which checkpoints stay; None: all.
            begin_seconds: when training began to stand still, by `time.monotonic`.

        Raises:
            CheckpointError, NumericsError, ResourceError: now, or at the next `wait`; of this save or of the last.
        """
        self.wait()
        contents = self._collect(step, pieces, state)
        stall_seconds = None
        if self._copy is not None:
            contents = replace(contents, elements=self._copy.take(contents.elements))
            stall_seconds = time.monotonic() - begin_seconds
        job = partial(self._write, path, step, contents, write_files, keep, begin_seconds, stall_seconds)
        if self._copy is None:
            job()
            self.wait()
            return
        self._begin(job)

    def _begin(self, job: _Job, *, is_reserving: bool = False) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._is_done.clear()
        self._is_reserving = is_reserving
        self._jobs.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether a save is going on, of which other ranks may see the end earlier."""
        return not (self._is_reserving or self._is_done.is_set())

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

    def _collect(self, step: int, pieces: Iterable[Piece], state: Mapping[str, object]) -> Contents:
        """Agree on what is written where, and write nothing yet. A collective."""
        plan, elements, numbers = self._planner.plan(pieces)
        content = {"format": FORMAT, "step": step, "world_size": world_size()}
        text, problem = "", None
        try:
            # Now, as training changes the state; without line breaks, which json makes ten times as slowly, and which
            # would be half of the file.
            text = json.dumps(content | numbers_as_json(numbers) | {"state": state}) if rank() == 0 else ""
        except (TypeError, ValueError) as error:
            # Raised in `write_files`, where all ranks hear of it.
            problem = CheckpointError("the state to save holds a value that JSON cannot", found=error)

        def write_state(folder: Path) -> None:
            if problem is not None:
                raise problem
            (folder / STATE_FILE).parent.mkdir(exist_ok=True)
            write_json(folder / STATE_FILE, text)

        return Contents(plan=plan, elements=elements, write_files=write_state, random_state=RandomState())

    def _write(
        self,
        path: Path | None,
        step: int,
        contents: Contents,
        write_files: _WriteFiles,
        keep: Keep | None,
        begin_seconds: float,
        stall_seconds: float | None,
    ) -> None:
        def report(written: Path, *, is_replica: bool) -> None:
            total_seconds = time.monotonic() - begin_seconds
            stalled = total_seconds if stall_seconds is None else stall_seconds
            if is_replica and path is not None:
                # It is that of the checkpoint.
                stalled = 0.0
            num_bytes = contents.plan.num_bytes
            self._reports.append(SaveReport(written, step, num_bytes, stalled, total_seconds, is_replica))

        def with_files(*, is_replica: bool) -> Contents:
            def write(folder: Path) -> None:
                write_files(folder, is_replica)
                contents.write_files(folder)

            return replace(contents, write_files=write)

        try:
            on_all_ranks(self._write_first, self._group)
            if self.replicas is not None and self._replicate(self.replicas, step, with_files(is_replica=True)):
                report(self.replicas.folder, is_replica=True)
            if path is not None:
                self._write_to_disk(path, step, with_files(is_replica=False), keep)
                report(path, is_replica=False)
        except BaseException as error:
            # A hook of the user may end the thread, too: then nobody would take the next job.
            self._error = error

    def _replicate(self, replicas: Replicas, step: int, contents: Contents) -> bool:
        """Write a replica. If the memory has become full, or is gone, training goes on without, on all ranks alike."""
        is_first = not replicas.has_written
        try:
            replicas.write(step, contents, self._group)
        except (CheckpointError, ResourceError) as error:
            if is_first and isinstance(error, ResourceError):
                raise
            if rank() == 0:
                logger.warning("from step %d on there are no replicas in memory: %s", step, error)
            self.replicas = None
            return False
        return True

    def _write_to_disk(self, path: Path, step: int, contents: Contents, keep: Keep | None) -> None:
        def start() -> Path:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(path.parent)
            return temporary(path)

        def finish(unfinished: Path, written: list[Part]) -> None:
            contents.manifest(step, written).write(unfinished)
            commit(unfinished, path)

        write_folder(contents, path.parent, start, finish, self._group)
        if keep is not None:
            # Awaited by all: a rank that ends takes the others along under most launchers.
            on_rank_zero(partial(prune, path.parent, keep), self._group)


def _reserve(copy: _HostCopy, layout: Sequence[tuple[int, torch.dtype]]) -> None:
    # Whatever it is, the save meets it again, and says so; the thread must go on.
    with suppress(Exception):
        copy.reserve(layout)


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
