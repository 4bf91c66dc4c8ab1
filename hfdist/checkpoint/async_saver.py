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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from hfdist.checkpoint.folder import Keep, commit, prune, remove_unfinished, temporary
from hfdist.checkpoint.host_copy import CopySpec, HostCopy
from hfdist.checkpoint.manifest import FORMAT, Part, write_json
from hfdist.checkpoint.optimizer_numbers import numbers_as_json
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.random_state import RandomState
from hfdist.checkpoint.replicas import Replicas
from hfdist.checkpoint.save_plan import MODEL_STEM, STATE_FILE, Planner
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


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save as it was asked for: what is written where, and for how long training stood still."""

    path: Path | None
    """The checkpoint; None: a replica alone."""
    step: int
    contents: Contents
    write_files: _WriteFiles
    keep: Keep | None
    begin_seconds: float
    stall_seconds: float | None
    """Seconds for which training stood still; None: it does until the save has ended."""

    def contents_of(self, *, is_replica: bool) -> Contents:
        """Give the contents with the files that go with the tensors of a replica, or of the checkpoint."""

        def write(folder: Path) -> None:
            self.write_files(folder, is_replica)
            self.contents.write_files(folder)

        return replace(self.contents, write_files=write)

    def report(self, written: Path, *, is_replica: bool) -> SaveReport:
        """Report that a replica, or the checkpoint, was written just now."""
        total_seconds = time.monotonic() - self.begin_seconds
        stall_seconds = total_seconds if self.stall_seconds is None else self.stall_seconds
        if is_replica and self.path is not None:
            # The same stall is in the report of the checkpoint that follows.
            stall_seconds = 0.0
        return SaveReport(
            path=written,
            step=self.step,
            num_bytes=self.contents.plan.num_bytes,
            stall_seconds=stall_seconds,
            total_seconds=total_seconds,
            is_replica=is_replica,
        )


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
        self._copy = HostCopy() if in_background else None
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
            self._begin(partial(_reserve, self._copy, [CopySpec.of(one) for one in elements]), is_reserving=True)

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
        save = _Save(
            path=path,
            step=step,
            contents=contents,
            write_files=write_files,
            keep=keep,
            begin_seconds=begin_seconds,
            stall_seconds=stall_seconds,
        )
        if self._copy is None:
            self._write(save)
            self.wait()
        else:
            self._begin(partial(self._write, save))

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

    def _write(self, save: _Save) -> None:
        try:
            on_all_ranks(self._write_first, self._group)
            if self.replicas is not None and self._replicate(self.replicas, save):
                self._reports.append(save.report(self.replicas.folder, is_replica=True))
            if save.path is not None:
                self._write_to_disk(save.path, save)
                self._reports.append(save.report(save.path, is_replica=False))
        except BaseException as error:
            # Whatever it is: an error that ended the thread would leave nobody to take the next job.
            self._error = error

    def _replicate(self, replicas: Replicas, save: _Save) -> bool:
        """Write a replica. If the memory has become full, or is gone, training goes on without, on all ranks alike."""
        is_first = not replicas.has_written
        try:
            replicas.write(save.step, save.contents_of(is_replica=True), self._group)
        except (CheckpointError, ResourceError) as error:
            if is_first and isinstance(error, ResourceError):
                raise
            if rank() == 0:
                logger.warning("from step %d on there are no replicas in memory: %s", save.step, error)
            self.replicas = None
            return False
        return True

    def _write_to_disk(self, path: Path, save: _Save) -> None:
        contents = save.contents_of(is_replica=False)

        def start() -> Path:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(path.parent)
            return temporary(path)

        def finish(unfinished: Path, written: list[Part]) -> None:
            contents.manifest(save.step, written).write(unfinished)
            commit(unfinished, path)

        write_folder(contents, path.parent, start, finish, self._group)
        if save.keep is not None:
            # Awaited by all: a rank that ends takes the others along under most launchers.
            on_rank_zero(partial(prune, path.parent, save.keep), self._group)

    def end_soon(self) -> None:
        """Let the thread end what it does, and no more, as the process ends."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(_LAST_SECONDS)


def _reserve(copy: HostCopy, specs: Sequence[CopySpec]) -> None:
    # Whatever it is, the save meets it again, and says so; the thread must go on.
    with suppress(Exception):
        copy.reserve(specs)


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
    if saver is not None:
        saver.end_soon()
