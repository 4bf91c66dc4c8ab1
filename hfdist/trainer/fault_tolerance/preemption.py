"""How a run stops at a signal to any of its processes: all ranks finish the same step, save once, and end.

first signal     the step ends, a save, the run ends with exit code 75
second signal    before the save: this process ends at once; after it: uploads and the like are given up
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.collectives import rank
from hfdist.errors import PreemptedError
from hfdist.processes.stop_signals import heard_signals, leave_closed_terminal
from hfdist.records.run_end import end_by_signal
from hfdist.trainer.fault_tolerance.rank_flags import stop_after_step

logger = logging.getLogger(__name__)

_SAME_REQUEST_SECONDS = 2.0
"""Signals within this time are one request: a terminal sends Ctrl-C to all, and a launcher then sends SIGTERM."""


class Preemption(TrainerCallback):
    """Raises a flag for all ranks when this rank is sent a signal: a `RankFlag`.

    It listens from the beginning of the training to its end: before and after there is nothing to lose.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        """Name of the signal after which this run has stopped."""
        self.is_hurried = False
        """Whether this rank has heard another signal after the save: what follows it is to be given up."""
        self._received = 0
        """Number of the first signal; 0: there was none."""
        self._received_seconds = 0.0
        """When it came, on the monotonic clock."""
        self._before: Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        """The handlers of the signals before the training."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Begin to listen to signals."""
        self._before = {number: signal.signal(number, self._receive) for number in heard_signals()}

    def flag(self) -> int:
        """Give the number of the signal that this rank was sent; 0: none."""
        return self._received

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Let the Trainer save and stop after the step; `flag` is the number of the signal."""
        leave_closed_terminal()
        if stop_after_step(state, control):
            self.stopped_by = signal.Signals(flag).name
            logger.warning("%s: saving after step %d, and stopping", self.stopped_by, state.global_step)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Put the handlers back that were there before the training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def hearing_again(self) -> Iterator[None]:
        """Note another signal in `is_hurried`, in place of ending by it: all is saved, and the exit code stays."""

        def hear(number: int, frame: FrameType | None) -> None:
            leave_closed_terminal()
            self.is_hurried |= time.monotonic() - self._received_seconds > _SAME_REQUEST_SECONDS

        before = {number: signal.signal(number, hear) for number in heard_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, run_dir: str) -> None:
        """Raise a PreemptedError, if the run was told to stop."""
        if self.stopped_by is not None:
            what = "the run was told to stop, and has saved where it was"
            raise PreemptedError(what, where=run_dir, found=self.stopped_by, hint="the same command goes on from there")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        leave_closed_terminal()
        if self._received and now - self._received_seconds > _SAME_REQUEST_SECONDS:
            # A second request ends the process at once. A checkpoint gets its name last, so none is damaged.
            end_by_signal(number)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._received:
            self._received, self._received_seconds = number, now
            if rank() == 0:
                # Said at once: a step may take minutes. Not by a logger, which the signal may have interrupted.
                os.write(2, f"\n{signal.Signals(number).name}: saving once this step ends\n".encode())
