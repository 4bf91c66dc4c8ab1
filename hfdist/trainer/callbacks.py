"""What people and scripts see while a run goes: metrics.jsonl and a progress bar, on rank 0 only."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.errors import ResourceError
from hfdist.pipeline.timeline import bubble_fraction, write_chrome_trace
from hfdist.pipeline.timeline_plot import draw
from hfdist.strategies.base import Engine

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@runtime_checkable
class GoesBack(Protocol):
    """A callback that must know when the run goes back to a checkpoint."""

    def on_go_back(self, state: TrainerState) -> None:
        """Forget the steps behind `state.global_step`: they will be done again."""


class MetricsWriter(TrainerCallback):
    """One JSON object for each logged step and each evaluation, floats at full precision.

    A value that is not finite is written as null: JSON has no NaN.

    Raises:
        ResourceError: in any of its events, a line that the disk does not take.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._file: TextIO | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Open the file; on a resume, drop lines of steps that will be done again."""
        if state.is_world_process_zero:
            self._open(state)

    def on_go_back(self, state: TrainerState) -> None:
        """Drop lines of steps that will be done again."""
        if self._file is not None:
            self._file.close()
            self._open(state)

    def _open(self, state: TrainerState) -> None:
        kept = [line for line in read_metrics(self._path) if line["step"] <= state.global_step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the old file first: a run that is killed in between must find the lines again.
        unfinished = self._path.with_suffix(".tmp")
        self._file = unfinished.open("w", encoding="utf-8")
        for line in kept if state.global_step > 0 else []:
            self._write(line)
        unfinished.replace(self._path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Write training lines (with `loss`), evaluations (`eval_loss`), what was read (`data/`) and saved."""
        is_written = any(key in ("loss", "eval_loss") or key.startswith(("data/", "checkpoint/")) for key in logs or ())
        if self._file is not None and is_written:
            self._write({"step": state.global_step} | (logs or {}))

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            # A disk that takes no line takes no checkpoint either; the last one is whole.
            raise ResourceError(
                "the metrics cannot be written",
                where=str(self._path),
                found=f"{error.strerror}; {shutil.disk_usage(self._path.parent).free:,} bytes free",
                hint="free space, or another disk for run.dir",
            ) from error


class TimelineDrawer(TrainerCallback):
    """Draws the measured schedule of the third step, which is past all warming up: timeline.png and timeline.json."""

    def __init__(self, run_dir: Path, engine: Engine) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._steps_until = 2

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Ask for the record of the step that begins."""
        if self._steps_until == 0 and self._engine.step_record is not None:
            self._engine.step_record.ask()
        self._steps_until -= 1

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Draw it, if there were three steps and they had a schedule."""
        record = self._engine.step_record
        if record is None or not record.events or not state.is_world_process_zero:
            return
        try:
            picture = draw(record.events, self._run_dir / "timeline.png", title=record.title, formula=record.formula)
            write_chrome_trace(record.events, self._run_dir / "timeline.json")
        except OSError as error:
            # The model is still to be exported, and matters more.
            logger.warning("no picture of the schedule: %s", error)
            return
        measured, expected = 100 * bubble_fraction(record.events), 100 * record.formula
        logger.info("schedule: %s, %.1f %% idle, %.1f %% by the formula", picture, measured, expected)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl; none: an empty list. A line cut off by a kill is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class ProgressBar(TrainerCallback):
    """A bar with loss, held-out loss and tokens/s."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Show the bar, from the step at which the run goes on."""
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="train",
                unit="step",
                file=sys.stderr,
                dynamic_ncols=True,
                mininterval=0.5,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Advance."""
        self._move(state)

    def on_go_back(self, state: TrainerState) -> None:
        """Show the step at which the run goes on."""
        self._move(state)

    def _move(self, state: TrainerState) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Show the newest figures."""
        if self._bar is None or logs is None:
            return
        for key, label, form in _SHOWN:
            if logs.get(key) is not None:
                self._shown[label] = form.format(logs[key])
        self._bar.set_postfix(self._shown, refresh=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Leave the full bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_SHOWN = (
    ("loss", "loss", "{:.3f}"),
    ("eval_loss", "held-out", "{:.3f}"),
    ("tokens_per_second", "tok/s", "{:,.0f}"),
    ("mfu", "mfu", "{:.1%}"),
)
