"""The callback that writes plan.json at the start of a run, and grade.json, what it has measured of it, at the end.

Nothing here fails a run: what cannot be written or measured is a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.atomic_write import write_atomically
from hfdist.collectives import gather_json
from hfdist.control_group import control_group
from hfdist.errors import named_line
from hfdist.planning.grade import Held, Measured, grade_to_json
from hfdist.planning.plan import Plan
from hfdist.planning.timing.calibration import TimedStep, write_step
from hfdist.records import RunFolder, RunRecorder, read_lines
from hfdist.records.lines import Line
from hfdist.records.rank_lines import QUANTILES, STEPS, RankColumn
from hfdist.strategies.engine import Engine

logger = logging.getLogger(__name__)

_LOOKED_AT_STEP = 2
"""Number of steps of this start in which held bytes are counted: the optimizer has its state after the first."""
_UNSTEADY_STEPS = 2
"""Number of first steps of this start whose time says nothing of the others: they also compile, and fill caches."""


class PlanGrader(TrainerCallback):
    """Measures what a plan has predicted, where that is all of a step. All ranks have it; rank 0 writes.

    Args:
        plan: the plan, on rank 0; None: there is none, and nothing is written.
        folder: the folder of the run.
        engine: the engine whose bytes are counted.
        runtime_bytes: bytes resident before the model was made; None: peaks do not hold them, as on a GPU.
        recorder: writes the run's record, on rank 0; None on the others.
        steps: the file of measured steps, from which later plans learn.
    """

    def __init__(
        self,
        plan: Plan | None,
        folder: RunFolder,
        engine: Engine,
        *,
        runtime_bytes: int | None,
        recorder: RunRecorder | None,
        steps: Path,
    ) -> None:
        self._steps = steps
        self._plan, self._folder, self._engine = plan, folder, engine
        self._runtime_bytes, self._recorder = runtime_bytes, recorder
        self._first_step = 0
        """Steps that were done before this start."""
        self._held: dict[str, int] = {}
        """The most bytes that this rank has held of each kind, such as weights and gradients."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the plan on rank 0."""
        self._first_step = state.global_step
        if state.is_world_process_zero:
            with _warning(self._folder.grade.name):
                # An earlier start may have left one.
                self._folder.grade.unlink(missing_ok=True)
        if self._plan is not None:
            with _warning(self._folder.plan.name):
                _write(self._folder.plan, self._plan.to_json())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count gradients, which are gone after the step."""
        if state.global_step - self._first_step + 1 <= _LOOKED_AT_STEP:
            with _warning(self._folder.grade.name):
                self._held = {**self._held, **self._engine.held_bytes(args.device)}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count what is held between steps."""
        if state.global_step - self._first_step <= _LOOKED_AT_STEP:
            with _warning(self._folder.grade.name):
                now = self._engine.held_bytes(args.device)
                # The most counts: most engines have freed gradients by now, and some keep them.
                self._held |= {kind: max(num_bytes, self._held.get(kind, 0)) for kind, num_bytes in now.items()}

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the grade on rank 0. A collective."""
        held_here = self._held if self._runtime_bytes is None else self._held | {"runtime": self._runtime_bytes}
        held = gather_json(held_here, control_group())
        if self._plan is None or self._plan.not_counted:
            # What was measured holds more than what was planned.
            return
        with _warning(self._folder.grade.name):
            measured = self._measure(held, state)
            _write(self._folder.grade, grade_to_json(self._plan, measured))
            self._tell_later_plans(self._plan, measured)

    def _tell_later_plans(self, plan: Plan, measured: Measured) -> None:
        """Write down how long a step took, beside the ideal time of its parts."""
        # A plan by formulas has no ideal seconds to learn from.
        if plan.ideal_seconds and measured.step_seconds is not None and measured.steps > _UNSTEADY_STEPS:
            step = TimedStep(
                hardware=plan.hardware,
                layout=plan.layout,
                ideal=plan.ideal_seconds,
                step_seconds=measured.step_seconds,
            )
            write_step(step, self._steps)

    def _measure(self, held: list[dict[str, int]], state: TrainerState) -> Measured:
        """Find what this start has measured; `held` has each rank's bytes by kind."""
        lines = [line for line in read_lines(self._folder.ranks) if line.get("step", 0) > self._first_step]
        # A short start has no steady steps.
        steady = [line for line in lines if line["step"] > self._first_step + _UNSTEADY_STEPS] or lines
        slowest = [seconds for seconds in map(_slowest, steady) if seconds is not None]
        peaks = _most_by_rank(lines, RankColumn.peak_bytes)
        fullest_rank = peaks.index(max(peaks)) if peaks else 0
        held_there = None
        if peaks and fullest_rank < len(held):
            held_there = Held(peak=peaks[fullest_rank], parts=held[fullest_rank])
        record = None if self._recorder is None else self._recorder.record
        return Measured(
            rank=fullest_rank,
            held=held_there,
            step_seconds=median(slowest) if slowest else None,
            steps=state.global_step - self._first_step,
            sent_bytes={} if record is None else record.sent_bytes() or {},
            cost=None if record is None else record.cost,
            kwh=None if record is None else record.energy_kwh,
        )


def _slowest(line: Line) -> float | None:
    """Give the slowest rank's seconds in a step; None: not known.

    A line of one step has a column with each rank's seconds. A line of many steps has their means, which hide that the
    ranks are slow in turns; so the greatest of its quantiles counts.
    """
    seconds = _numbers(line, RankColumn.step_seconds)
    if QUANTILES in line or STEPS in line:
        seconds = line.get(QUANTILES, {}).get(RankColumn.step_seconds.value) or []
    return max(seconds, default=None)


def _most_by_rank(lines: Sequence[Line], column: RankColumn) -> list[float]:
    """Give the greatest value of each rank over all lines that have the column."""
    columns = [numbers for numbers in (_numbers(line, column) for line in lines) if numbers]
    return [max(values_of_rank) for values_of_rank in zip(*columns, strict=False)]


def _numbers(line: Line, column: RankColumn) -> list[float]:
    return [value for value in line.get(column.value) or [] if isinstance(value, (int, float))]


def _write(path: Path, content: Mapping[str, object]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode(), is_durable=False)


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Turn any error within the block into a warning: a run is worth more than its plan."""
    try:
        yield
    except Exception as error:
        logger.warning("no %s: %s", what, named_line(error))
