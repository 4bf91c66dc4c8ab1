"""Tells of alerts on rank 0: on the console, in events.jsonl, to the trackers, and to a command of the user's."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.config.run import CheckpointConfig
from hfdist.errors import HfdistError
from hfdist.records import Event, RunRecorder
from hfdist.records.lines import Line
from hfdist.run.callbacks.line_reader import LineReader
from hfdist.tools.alerts import Alert, Monitor
from hfdist.tools.alerts.command import AlertCommand

logger = logging.getLogger(__name__)


class Alerts(LineReader):
    """Watches the lines of metrics and of ranks, and tells of the alerts in them.

    Args:
        recorder: writes the record and the events of the run.
        checkpoint: how often the run saves, and how many checkpoints stay.
        command: the user's command, `report.alert_command`; None: there is none.
        log: logs figures to the trackers, as the Trainer's `log` does.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        checkpoint: CheckpointConfig,
        command: str | None,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        self._recorder, self._checkpoint, self._log = recorder, checkpoint, log
        self._command = None if command is None else AlertCommand(command)
        self._to_log: dict[str, float] = {}
        """Figures that the trackers are to be given before the next step."""
        self._has_ended = False
        """Whether the training has ended: a command that is started later is waited for at once."""

    @cached_property
    def _monitor(self) -> Monitor:
        """The judge of the lines, made when the first one comes: by then the record knows hosts and steps."""
        record, checkpoint = self._recorder.record, self._checkpoint
        return Monitor(
            max_steps=record.max_steps,
            save_every=checkpoint.every,
            num_kept=checkpoint.keep + checkpoint.keep_best,
            num_stages=int(record.layout.get("pipeline", 1)),
            hosts=record.hosts,
        )

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Judge a line of training, of a save or of an upload."""
        is_save = "checkpoint/step" in line
        if not is_save and "mirror/step" not in line and "step_seconds" not in line:
            return
        free_bytes = None
        if is_save:
            with suppress(OSError):
                free_bytes = shutil.disk_usage(self._recorder.run_dir).free
        step = line.get("checkpoint/step", line.get("mirror/step", state.global_step))
        self._tell(self._monitor.see_metrics({"step": step, **line}, free_bytes))
        if self._has_ended and self._command is not None:
            # The last upload to the mirror may end after the training, and bring an alert.
            self._command.wait()

    def see_ranks(self, line: Line) -> bool:
        """Judge a line with the figures of all ranks; give whether there is an alert."""
        alerts = self._monitor.see_ranks(line)
        self._tell(alerts)
        return bool(alerts)

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Give the trackers what is to be logged: not earlier, while they are being given another line."""
        if self._to_log:
            to_log, self._to_log = self._to_log, {}
            self._log(to_log)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Give the trackers the last alerts, and wait for commands to end."""
        self.on_step_begin(args, state, control)
        self._has_ended = True
        if self._command is not None:
            self._command.wait()

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            logger.warning("step %d: %s", alert.step, alert.text)
            self._to_log[f"alert/{alert.kind.value}"] = 1
            try:
                self._recorder.add(Event.alert, **alert.to_json())
            except HfdistError as error:
                # The disk may be full, which may be what the alert is about.
                logger.warning("events.jsonl lacks this alert: %s", error)
            if self._command is not None:
                self._command.start({"run": str(self._recorder.run_dir)} | alert.to_json())
