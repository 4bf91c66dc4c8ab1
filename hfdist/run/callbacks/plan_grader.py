"""plan.json and grade.json of a run: what was planned at its start, and what it has measured at its end.

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
"""Last step of this start at which the bytes held are counted: the optimizer has its state by then."""
_UNSTEADY_STEPS = 2
"""Number of first steps of this start that are not steady: they also compile, and fill caches."""


class PlanGrader(TrainerCallback):
    """Measures what a plan has said, where that is all of a step. All ranks have it; rank 0 writes.

    Args:
        plan: the plan, on rank 0; None: there is none, and nothing is written.
        folder: the folder of the run.
        engine: the engine whose bytes are counted.
        runtime_bytes: bytes resident before the model was made; None: peaks do not hold them, as on a GPU.
        recorder: that of rank 0; None on the others.
        steps: the file from which later plans learn; see `write_step`.
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
        self._held: dict[str, int] = {}

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
                # Gradients are freed by now, but not those that an engine keeps.
                self._held |= {k: max(v, self._held.get(k, 0)) for k, v in now.items()}

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the grade on rank 0. A collective."""
        own = self._held if self._runtime_bytes is None else self._held | {"runtime": self._runtime_bytes}
        held = gather_json(own, control_group())
        if self._plan is None or self._plan.not_counted:
            # What was measured holds more than what was planned.
            return
        with _warning(self._folder.grade.name):
            measured = self._measure(held, state)
            _write(self._folder.grade, grade_to_json(self._plan, measured))
            self._tell_later_plans(self._plan, measured)

    def _tell_later_plans(self, plan: Plan, measured: Measured) -> None:
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
        lines = [line for line in read_lines(self._folder.ranks) if line.get("step", 0) > self._first_step]
        steady = [line for line in lines if line["step"] > self._first_step + _UNSTEADY_STEPS] or lines
        peaks = _most_by_rank(lines, RankColumn.peak_bytes)
        known = [seconds for line in steady if (seconds := _slowest(line)) is not None]
        worst = max(range(len(peaks)), key=peaks.__getitem__) if peaks else 0
        steps = state.global_step - self._first_step
        record = None if self._recorder is None else self._recorder.record
        return Measured(
            rank=worst,
            held=Held(peak=peaks[worst], parts=held[worst]) if peaks and worst < len(held) else None,
            step_seconds=median(known) if known else None,
            steps=steps,
            sent_bytes={} if record is None else record.sent_bytes() or {},
            cost=None if record is None else record.cost,
            kwh=None if record is None else record.energy_kwh,
        )


def _slowest(line: Line) -> float | None:
    """Give the seconds a step of the slowest rank; None: not known.

    With many ranks they are among the quantiles: columns are means of many steps, in which each rank has its turn.
    """
    is_of_many = QUANTILES in line or STEPS in line
    quantiles: list[float] = line.get(QUANTILES, {}).get(RankColumn.step_seconds.value) or []
    return max(quantiles if is_of_many else _numbers(line, RankColumn.step_seconds), default=None)


def _most_by_rank(lines: Sequence[Line], column: RankColumn) -> list[float]:
    columns = [numbers for line in lines if (numbers := _numbers(line, column))]
    return [max(of_rank) for of_rank in zip(*columns, strict=False)]


def _numbers(line: Line, column: RankColumn) -> list[float]:
    return [value for value in line.get(column.value) or [] if isinstance(value, (int, float))]


def _write(path: Path, content: Mapping[str, object]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode(), is_durable=False)


@contextmanager
def _warning(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("no %s: %s", what, named_line(error))
