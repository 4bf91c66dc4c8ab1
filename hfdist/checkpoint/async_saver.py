"""`Saver`: saves checkpoints and replicas in a thread, while training waits for a copy of its tensors in memory only.

training    step | wait, plan, copy | step | step | step
thread                              | replica in memory | files on the disk | commit | prune
"""

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
"""Seconds that a save still has when its process ends after a failure.

If the thread came back from gloo, whose peers may end as well, while the interpreter ends, it would abort the process.
"""

_Job = Callable[[], None]
_WriteFiles = Callable[[Path, bool], object]
"""Writes the files that go with the tensors into a folder: (folder, whether it is a replica)."""


class SaveReport(NamedTuple):
    """A save that has ended well."""

    path: Path
    """The checkpoint, or the folder of the replicas."""
    step: int
    num_bytes: int
    """Bytes of the tensor files of all ranks."""
    stall_seconds: float
    """Seconds for which training stood still, with the wait for an earlier save that had not ended."""
    total_seconds: float
    """Seconds from the begin of the save until the checkpoint had its name."""
    is_replica: bool = False
    """Whether the save has made a replica in memory, and not a checkpoint on the disk."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save as it was asked for: what is written where, and for how long training stood still."""

    path: Path | None
    """Path of the checkpoint; None: only a replica is written."""
    step: int
    contents: Contents
    """Tensors, numbers and state; for `write_files` see `contents_of`."""
    write_files: _WriteFiles
    keep: Keep | None
    """Which checkpoints stay; None: all."""
    begin_seconds: float
    """Time on the monotonic clock at which training began to stand still."""
    stall_seconds: float | None
    """Seconds for which training stood still; None: it does until the save has ended."""

    def contents_of(self, *, is_replica: bool) -> Contents:
        """Give the contents with all small files: those of the state, and those that `write_files` writes."""

        def write(folder: Path) -> None:
            self.write_files(folder, is_replica)
            self.contents.write_files(folder)

        return replace(self.contents, write_files=write)

    def report(self, written: Path, *, is_replica: bool) -> SaveReport:
        """Make the report of a replica or the checkpoint that was written just now, at the path `written`."""
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

    All ranks make it together: that is a collective.

    Args:
        in_background: False: training waits until all is on the disk, and no memory for a copy is needed.
        stem: name of the files of weights, without the number of a shard and the ending.
        names: names of the tensors in these files, where they differ from those of the model.
        write_first: called on every rank in each save before anything else is written, while training may go on.
        replicas: the replicas of the run: each save writes one before it writes to the disk; None: none.
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
        """The replicas of the run; None: it has none, or not any more, as the memory has become full."""
        self._planner = Planner(stem=stem, names=names)
        self._copy = HostCopy() if in_background else None
        self._group = ControlGroup() if in_background and world_size() > 1 else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_done = threading.Event()
        self._is_done.set()
        self._is_reserving = False
        """Whether the last job makes memory for copies, and is no save."""
        # One thread for all saves: a new one may allocate in another arena of the C library, which keeps what is freed
        # there. A daemon, so that a process that fails ends soon: a folder without its name is no checkpoint.
        self._thread = threading.Thread(target=_do_all, args=(self._jobs, self._is_done), name="save", daemon=True)
        self._error: BaseException | None = None
        """Error of the last save, until `wait` raises it."""
        self._reports: deque[SaveReport] = deque()
        # None ends the thread: when nobody uses this object any more, or when the process ends.
        weakref.finalize(self, self._jobs.put, None)
        atexit.register(_end_soon, weakref.ref(self))

    def prepare(self, pieces: Iterable[Piece]) -> None:
        """Make the plan, and in the thread the memory for copies, so that the first save need not. A collective.

        To make page-locked memory takes longer than a step. If there is too little, the first save says so.

        Args:
            pieces: the pieces of this rank.
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
            path: a path in the run's folder of checkpoints, with a name such as step-00000100; None: only a replica
                is written.
            step: number of optimizer steps that the state has done.
            pieces: the pieces of this rank.
            state: JSON values that `read_checkpoint` gives back; those of rank 0 are written.
            write_files: writes the files that go with the tensors, such as the tokenizer's; called on rank 0 with a
                folder and whether it is a replica, maybe while training goes on. A replica needs those of a start only.
            keep: which checkpoints stay; None: all.
            begin_seconds: time on the monotonic clock at which training began to stand still.

        Raises:
            CheckpointError, NumericsError, ResourceError: the last save has failed; or this one, if training waits for
                it. Otherwise the next call of `wait` raises the error of this one.
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
        """Let the thread do a job."""
        if self._thread.ident is None:
            self._thread.start()
        self._is_done.clear()
        self._is_reserving = is_reserving
        self._jobs.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether a save is going on. Other ranks may see its end a little earlier."""
        return not (self._is_reserving or self._is_done.is_set())

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed, as far as this rank knows, so that `wait` will raise its error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until nothing is being saved. All ranks call it, and raise the same error.

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
        """Agree with the other ranks on what is written where, and write nothing yet. A collective."""
        plan, elements, numbers = self._planner.plan(pieces)
        content = {"format": FORMAT, "step": step, "world_size": world_size()}
        text, problem = "", None
        try:
            if rank() == 0:
                # Now, as training changes the state. Without line breaks: json makes them ten times as slowly, and
                # they would be half of the file.
                text = json.dumps(content | numbers_as_json(numbers) | {"state": state})
        except (TypeError, ValueError) as error:
            # It is raised in `write_state`, of whose failures all ranks hear.
            problem = CheckpointError("the state to save holds a value that JSON cannot", found=error)

        def write_state(folder: Path) -> None:
            if problem is not None:
                raise problem
            (folder / STATE_FILE).parent.mkdir(exist_ok=True)
            write_json(folder / STATE_FILE, text)

        return Contents(plan=plan, elements=elements, write_files=write_state, random_state=RandomState())

    def _write(self, save: _Save) -> None:
        """Write a replica and a checkpoint, and keep the error if that fails."""
        try:
            on_all_ranks(self._write_first, self._group)
            if self.replicas is not None and self._replicate(self.replicas, save):
                self._reports.append(save.report(self.replicas.folder, is_replica=True))
            if save.path is not None:
                self._write_to_disk(save.path, save)
                self._reports.append(save.report(save.path, is_replica=False))
        except BaseException as error:
            # Of any kind: an error that ended the thread would leave nobody to do the next job.
            self._error = error

    def _replicate(self, replicas: Replicas, save: _Save) -> bool:
        """Write a replica, and say whether that was done.

        If the memory has become full or is gone, there is a warning, and no replica from then on, on all ranks alike.

        Raises:
            ResourceError: there is no room already for the first replica.
        """
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
        """Write a checkpoint, and then remove those that nothing keeps."""
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
            # All ranks wait for it: one that ended early would end the others, too, under most launchers.
            on_rank_zero(partial(prune, path.parent, save.keep), self._group)

    def end_soon(self) -> None:
        """Give the thread a few seconds to end its present job, as the process ends."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(_LAST_SECONDS)


def _reserve(copy: HostCopy, specs: Sequence[CopySpec]) -> None:
    # Whatever it is, the save meets it again, and says so; the thread must go on.
    with suppress(Exception):
        copy.reserve(specs)


def _do_all(jobs: SimpleQueue[_Job | None], is_done: threading.Event) -> None:
    """Do jobs until None comes.

    Between two jobs nothing is held: neither the tensors of the last save, nor the `Saver`, which may end then.
    """
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
