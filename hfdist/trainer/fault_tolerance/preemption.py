"""A signal to any process of a run lets all ranks finish the same step, save once, and end with exit code 75."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.errors import PreemptedError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal sends Ctrl-C to all processes, and a launcher that gets it sends SIGTERM after it: both mean one wish.
_SAME_WISH_SECONDS = 2.0


class Preemption(TrainerCallback):
    """Listens from the beginning of training to its end. Before and after there is nothing to lose."""

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        """Name of the signal after which this run has stopped."""
        self._received = 0
        self._received_seconds = 0.0
        self._before: Mapping[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Begin to listen."""
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def wish(self) -> int:
        """Number of the signal that this rank was sent; 0: none."""
        return self._received

    def agreed(self, wish: int, state: TrainerState, control: TrainerControl) -> None:
        """Save and stop."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            return
        self.stopped_by = signal.Signals(wish).name
        logger.warning("%s: saving after step %d, and stopping", self.stopped_by, state.global_step)
        control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Listen no more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self, run_dir: str) -> None:
        """End the run as one that was told to stop.

        Raises:
            PreemptedError: it was.
        """
        if self.stopped_by is not None:
            raise PreemptedError(
                "the run was told to stop, and has saved where it was",
                where=run_dir,
                found=self.stopped_by,
                hint="the same command goes on from there",
            )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received and now - self._received_seconds > _SAME_WISH_SECONDS:
            # The second wish: at once. What is being saved has no name yet, so that nothing is damaged.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._received:
            self._received, self._received_seconds = number, now
