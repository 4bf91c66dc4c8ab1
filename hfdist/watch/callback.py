"""The watch as a callback: marks progress at the Trainer's events, and makes a broken connection one message."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from types import TracebackType

from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hfdist.collectives import gather_json, rank, world_size
from hfdist.errors import ConfigError, HfdistError, PeerError, first_line
from hfdist.records import Event, RunFolder, RunRecorder, add_event
from hfdist.records.run_end import record_end_of_run
from hfdist.watch.diagnosis import Diagnosis
from hfdist.watch.heartbeat import ENDING, EVALUATING, SAVING, STARTING, Progress, beat_seconds
from hfdist.watch.store import open_store
from hfdist.watch.watcher import Watcher

logger = logging.getLogger(__name__)

_VERDICT_SECONDS = 5.0
"""Seconds after the heartbeat within which the watch says who is missing, and ends the process."""
# Words in errors of gloo whose connection has broken.
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connectFullMesh")


def _event(name: str, *, is_end: bool = False) -> Callable[..., None]:
    """Make the method of an event: it marks progress. `is_end`: the event also ends what may take long."""

    def on_event(
        self: Watch, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        if is_end:
            self._go_on(name, control)
        else:
            self.progress.mark(name)

    return on_event


class Watch(TrainerCallback):
    """Ends the run with exit code 6 when a rank is dead, hung or cut off, so that a launcher can start it again.

    As a callback it watches from the beginning of training to its end. As a context (`with watch: trainer.train()`) it
    also tells the other ranks when this one ends with an error, and turns an error of a broken connection into one
    message. Add it after callbacks that decide about saving and stopping. One process is not watched.

    Args:
        run_dir: folder of the run; stacks and reports go to `watch/` in it.
        heartbeat_seconds: seconds that a rank may be silent, or all ranks without progress; None: no watch.
    """

    def __init__(self, run_dir: str | Path, heartbeat_seconds: float | None = 60.0) -> None:
        is_time = isinstance(heartbeat_seconds, Real) and 0 < heartbeat_seconds < math.inf
        if heartbeat_seconds is not None and not is_time:
            what, allowed = "this is no time", "a number of seconds > 0, or None"
            raise ConfigError(what, where="Watch(heartbeat_seconds)", found=repr(heartbeat_seconds), allowed=allowed)
        self.progress = Progress()
        self._run_dir, self._heartbeat_seconds = Path(run_dir).absolute(), heartbeat_seconds
        self._start_number: int | None = None
        """Number of this start in the record of the run; None: the run has no record."""
        self._watcher: Watcher | None = None
        self._is_context = False

    def __enter__(self) -> Watch:
        """Begin to watch. A collective."""
        self._is_context = True
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell the other ranks that this one ends.

        Raises:
            PeerError: in place of an error of a broken connection, where there is no watch to end the process.
        """
        if error is not None and is_broken_connection(error):
            if self._watcher is not None and self._heartbeat_seconds is not None:
                # The watch finds out who is missing, and ends the process from its own thread.
                self._watcher.broke()
                time.sleep(self._heartbeat_seconds + _VERDICT_SECONDS)
            raise PeerError(
                "the connection to another rank is lost",
                where=f"rank {rank()}, {self.progress.step} steps done",
                found=first_line(error),
                hint="the same command goes on from the last checkpoint; a rank that was killed says nothing itself",
            ) from None
        self._leave(_exit_code(error))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Begin to watch, unless it has begun. A collective."""
        self._start()
        self.progress.step = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Mark the beginning of a step, when its batches have been read."""
        self.progress.mark("the beginning of a step")
        if self.progress.exempt == SAVING:
            self.progress.exempt = None

    on_substep_end = _event("a micro batch")
    on_pre_optimizer_step = _event("the last micro batch")
    on_epoch_end = _event("the end of the data", is_end=True)
    on_save = _event("a save", is_end=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Mark the end of a step, and note what follows."""
        self.progress.step_done(state.global_step)
        self.progress.exempt = _what_follows(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Mark the end of an evaluation, and note what follows."""
        self._go_on("an evaluation", control)
        if args.save_strategy == SaveStrategy.BEST:
            # The Trainer decides about a save only after all callbacks.
            self.progress.exempt = SAVING

    def look_ahead(self, control: TrainerControl) -> None:
        """Note what follows, where others have changed it since the end of the step."""
        self.progress.exempt = _what_follows(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Stop watching; as a context, watch only that ranks are alive: rank 0 may go on alone."""
        self.progress.exempt = ENDING
        if not self._is_context:
            self._leave(0)

    def _go_on(self, mark: str, control: TrainerControl) -> None:
        self.progress.mark(mark)
        if self.progress.exempt != STARTING:
            # An evaluation before the first step does not end the start.
            self.progress.exempt = _what_follows(control)

    def _start(self) -> None:
        if self._watcher is not None or self._heartbeat_seconds is None or world_size() == 1:
            return
        recorder = RunRecorder.of_process
        own_start = None if recorder is None else recorder.record.start
        started, self._start_number = gather_json([time.strftime("%Y%m%d-%H%M%S"), own_start])[0]
        try:
            store = open_store(beat_seconds(self._heartbeat_seconds))
        except OSError as error:
            logger.warning("the ranks are not watched: %s", error)
            return
        folder = RunFolder(self._run_dir).watch / started
        self._watcher = Watcher(self.progress, store, folder, self._heartbeat_seconds, self._record)

    def _record(self, verdict: Diagnosis) -> None:
        """Write a verdict into the record of the run, where the run has a record."""
        if self._start_number is None:
            return
        if verdict.is_alarm:
            with suppress(HfdistError, OSError):
                add_event(self._run_dir, Event.lost_rank, start=self._start_number, found=verdict.line)
        record_end_of_run(self._run_dir, self._start_number, verdict.exit_code, verdict.line)

    def _leave(self, exit_code: int) -> None:
        if self._watcher is not None:
            self._watcher.leave(exit_code)
            self._watcher = None


def watches_among(callbacks: Iterable[object]) -> list[Watch]:
    """Find the watches among a Trainer's callbacks."""
    return [callback for callback in callbacks if isinstance(callback, Watch)]


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because a connection to another rank broke: gloo has no type for it, only words."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN)


def _exit_code(error: BaseException | None) -> int:
    """Give the exit code with which a process ends by this error; None: without one."""
    if error is None:
        return 0
    return error.exit_code if isinstance(error, HfdistError) else 1


def _what_follows(control: TrainerControl) -> str | None:
    """Name what follows a step, in the order of the Trainer, which clears each flag when that is done."""
    if control.should_evaluate:
        return EVALUATING
    if control.should_save:
        return SAVING
    return ENDING if control.should_training_stop else None
