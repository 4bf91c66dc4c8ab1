"""Tells the recorder of a run what happens in training: steps, resumes, saves, skipped steps, rollbacks."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from transformers import TrainerControl, TrainerState

from hfdist.collectives import gather_json
from hfdist.errors import printable
from hfdist.records import Event, RunRecorder
from hfdist.records.recorder import LONGEST_TEXT
from hfdist.run.callbacks.line_reader import LineReader
from hfdist.trainer.checkpointing.start import Start

_LINES = {Event.save: "checkpoint/", Event.mirror: "mirror/"}
"""What the figures of a line begin with that is an event by itself."""


class RecordWriter(LineReader):
    """Writes on rank 0, which has a recorder; all ranks have this callback.

    Args:
        recorder: writes the run's record; None on all ranks but the first.
        start: how this process's training begins: anew, or from a checkpoint.
    """

    def __init__(self, recorder: RunRecorder | None, start: Start) -> None:
        self._recorder, self._start = recorder, start

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write where the run begins, and on which hosts. A collective."""
        hosts = gather_json(platform.node())
        if self._recorder is None:
            return
        self._recorder.record.hosts, self._recorder.record.max_steps = hosts, state.max_steps
        self._go_to(self._recorder, state)
        for text in self._start.passed_over:
            self._recorder.add(Event.replica, step=state.global_step, found=printable(text, LONGEST_TEXT))
        if self._start.checkpoint is not None:
            name = Path(self._start.checkpoint).name
            changes = [printable(change, LONGEST_TEXT) for change in self._start.changes]
            memory = {"in_memory": True} if self._start.in_memory else {}
            self._recorder.add(Event.resume, step=state.global_step, checkpoint=name, changes=changes, **memory)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note the step."""
        if self._recorder is not None:
            self._recorder.step_done(state.global_step)

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Note tokens; write what is an event."""
        if self._recorder is None:
            return
        self._recorder.record.tokens = int(line.get("tokens", self._recorder.record.tokens))
        if line.get("skipped"):
            self._recorder.add(Event.skip, step=state.global_step)
        for event, prefix in _LINES.items():
            if f"{prefix}step" in line:
                figures = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
                self._recorder.add(event, **figures)

    def on_rollback(self, state: TrainerState) -> None:
        """Write the event, and the step to which the run went back."""
        if self._recorder is not None:
            self._recorder.add(Event.rollback, step=self._recorder.record.step, to_step=state.global_step)
            self._go_to(self._recorder, state)

    def _go_to(self, recorder: RunRecorder, state: TrainerState) -> None:
        recorder.record.step, recorder.record.tokens = state.global_step, int(state.num_input_tokens_seen)
        recorder.write()
