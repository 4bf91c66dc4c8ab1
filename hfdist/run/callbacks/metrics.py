"""The figures of a run as people and scripts see them: metrics.jsonl, a progress bar, pictures. On rank 0 only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.config.task import TaskName
from hfdist.pipeline.timeline import Event, write_chrome_trace
from hfdist.records import RunFolder, read_lines
from hfdist.run.callbacks.line_reader import LineReader
from hfdist.strategies.engine import Engine
from hfdist.tools.report.drawing.schedule import busy_share
from hfdist.tools.report.reading.timeline import Span
from hfdist.trainer.step.step_lines import StepLines

logger = logging.getLogger(__name__)

_WRITTEN = ("data/", "checkpoint/", "mirror/", "lm_eval/")
"""Beginnings of keys whose lines are written, besides those of training and evaluation."""
_RECORDED_STEP = 3
"""The step of a start whose schedule is drawn: the steps before it compile and warm up."""


class _Shown(NamedTuple):
    """A figure that the progress bar shows."""

    key: str
    label: str
    form: str
    """Format of the value."""


_SHOWN = (
    _Shown("loss", "loss", "{:.3f}"),
    _Shown("eval_loss", "held-out", "{:.3f}"),
    _Shown("eval_perplexity", "ppl", "{:.1f}"),
    _Shown("reward", "reward", "{:.3f}"),
    _Shown("eval_reward", "held-out", "{:.3f}"),
    _Shown("eval_rewards/accuracies", "accuracy", "{:.1%}"),
    _Shown("eval_accuracies", "accuracy", "{:.1%}"),
    _Shown("eval_recall_at_1", "recall@1", "{:.1%}"),
    _Shown("eval_rewards/margins", "margin", "{:.3f}"),
    _Shown("eval_margins", "margin", "{:.3f}"),
    _Shown("expert_load_max", "most loaded", "{:.2f}"),
    _Shown("expert_load_min", "least loaded", "{:.2f}"),
    _Shown("tokens_per_second", "tok/s", "{:,.0f}"),
    _Shown("mfu", "mfu", "{:.1%}"),
)


class MetricsWriter(LineReader, StepLines):
    """Writes lines of the training, of evaluations, and of what was read, saved, uploaded or judged by a harness."""

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Write a line under its step.

        The line of a save or an upload stands under the step that was saved, even if that ended some steps later: so a
        run that goes on from this step keeps the line.
        """
        saved_step = line.get("checkpoint/step", line.get("mirror/step", state.global_step))
        if any(key in ("loss", "eval_loss") or key.startswith(_WRITTEN) for key in line):
            self.write({"step": saved_step, **line})


class TimelineWriter(TrainerCallback):
    """Writes the measured schedule of a pipeline in one step, for the report to draw."""

    def __init__(self, folder: RunFolder, engine: Engine) -> None:
        self._folder, self._engine = folder, engine
        self._num_begun = 0

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Ask for the record of the step that begins."""
        self._num_begun += 1
        if self._num_begun == _RECORDED_STEP and self._engine.schedule_trace is not None:
            self._engine.schedule_trace.ask()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the timeline, if a step was recorded and the layout has a schedule."""
        record = self._engine.schedule_trace
        if record is None or not record.events or not state.is_world_process_zero:
            return
        try:
            write_chrome_trace(record.events, self._folder.timeline)
        except OSError as error:
            # The model is still to be exported, and matters more.
            logger.warning("no record of the schedule: %s", error)
            return
        measured, expected = 100 * idle_share(record.events), 100 * record.formula
        message = "schedule: %s, %.1f %% idle, %.1f %% by the formula; %s"
        logger.info(message, record.title, measured, expected, self._folder.timeline)


def idle_share(events: Sequence[Event]) -> float:
    """Give the share of a schedule in which ranks do not compute, from 0 to 1, as the report has it."""
    spans = [
        Span(
            rank=event.rank,
            kind=event.action.name,
            microbatch=event.microbatch,
            start_ms=1e3 * event.start_seconds,
            length_ms=1e3 * (event.stop_seconds - event.start_seconds),
        )
        for event in events
    ]
    return 1 - fmean(busy_share(spans).values())


class ProgressBar(LineReader):
    """A bar of the steps, with the newest figures of training and evaluation beside it."""

    def __init__(self) -> None:
        self._bar: tqdm[object] | None = None
        self._shown: dict[str, str] = {}

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Show the bar, from the step at which the run goes on."""
        if state.is_world_process_zero:
            known = {"total": state.max_steps, "initial": state.global_step, "desc": "train", "unit": "step"}
            self._bar = tqdm(**known, file=sys.stderr, dynamic_ncols=True, mininterval=0.5)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Advance the bar by a step."""
        self.on_rollback(state)

    def on_rollback(self, state: TrainerState) -> None:
        """Show the present step."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Show the figures of a line, each in the place of an older one."""
        if self._bar is None:
            return
        for shown in _SHOWN:
            if line.get(shown.key) is not None:
                self._shown[shown.label] = shown.form.format(line[shown.key])
        if "reward" in line:
            # A policy's loss is near 0 whatever the model can do.
            self._shown.pop("loss", None)
        self._bar.set_postfix(self._shown, refresh=False)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave the full bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def plot_losses(folder: RunFolder, task: TaskName = TaskName.causal_lm) -> None:
    """Draw `loss.png` from `metrics.jsonl`, if matplotlib is installed: losses, or rewards where a task has them."""
    try:
        # Imported at the end alone: a run needs it for nothing else, and it need not be installed.
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no loss.png: pip install 'hfdist[plot]', or report.plot=false; `hfdist report` draws without it")
        return
    lines = read_lines(folder.metrics)
    name, unit = ("reward", "mean of answers") if task.traits.is_reinforcement else ("loss", task.traits.loss_unit)
    train = [(line["tokens"], line[name]) for line in lines if line.get(name) is not None and "tokens" in line]
    # Lines of evaluations do not say how many tokens were read; one before the first step stands at the left edge.
    tokens_at = {0: 0} | {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    evaluations = [line for line in lines if line.get(f"eval_{name}") is not None and line["step"] in tokens_at]
    held_out = [(tokens_at[line["step"]], line[f"eval_{name}"]) for line in evaluations]
    # A Figure of its own, without pyplot, needs no display and leaves no state.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1, color="tab:blue", label="training, each logged step")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", markersize=4, color="tab:orange", label="held out")
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"{name} ({unit})")
    axes.set_title(folder.path.name)
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend()
    figure.savefig(folder.loss_picture, dpi=120)
