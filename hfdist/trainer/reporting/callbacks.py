"""What people and scripts see while a run goes: metrics.jsonl and a progress bar, on rank 0 only."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.pipeline.timeline import bubble_fraction, write_chrome_trace
from hfdist.strategies.base import Engine
from hfdist.trainer.reporting.jsonl import StepLines, read_lines

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

_WRITTEN = ("data/", "checkpoint/", "lm_eval/")


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
        self._lines = StepLines(run_dir / METRICS)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Open the file; lines of steps that will be done are set aside, as in all such files."""
        if state.is_world_process_zero:
            self._lines.open(state.global_step)

    def on_go_back(self, state: TrainerState) -> None:
        """Set the lines aside of steps that will be done again."""
        if state.is_world_process_zero:
            self._lines.open(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Write training lines (with `loss`), evaluations (`eval_loss`), and what begins with one of `_WRITTEN`.

        The line of a save is of the step that was saved, also where it has ended some steps later: a run that goes on
        from this step keeps it.
        """
        if logs and any(key in ("loss", "eval_loss") or key.startswith(_WRITTEN) for key in logs):
            self._lines.write({"step": logs.get("checkpoint/step", state.global_step)} | logs)


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
        # Here: most runs draw nothing until their end.
        from hfdist.pipeline.timeline_plot import draw

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
    return read_lines(path)


class ProgressBar(TrainerCallback):
    """A bar with loss, held-out loss, its perplexity and tokens/s."""

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
    ("eval_perplexity", "ppl", "{:.1f}"),
    ("tokens_per_second", "tok/s", "{:,.0f}"),
    ("mfu", "mfu", "{:.1%}"),
)
