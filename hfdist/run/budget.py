"""A run stops in time to save once a budget is nearly used up: rank 0 decides, and all ranks stop after that step."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import TrainerControl, TrainerState

from hfdist.config.checks.budgets import BUDGETS, describe, find_limits, to_iso, used_up
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError
from hfdist.records import Event, RunFolder, RunRecord, RunRecorder, read_lines
from hfdist.records.lines import Line
from hfdist.run.callbacks.line_reader import LineReader
from hfdist.run.usage import Usage
from hfdist.trainer.fault_tolerance.rank_flags import stop_after_step

logger = logging.getLogger(__name__)

_ASSUMED_BYTES_PER_PARAMETER = 12
"""Bytes of a parameter in a checkpoint: a float32 weight with two moments."""
_ASSUMED_BYTES_PER_SECOND = 1e8
"""A slow network disk: too long a reserve stops a run a little early, too short a one loses it."""
_LEAST_SAVE_SECONDS = 1.0


@dataclass
class Pace:
    """The longest that each part of a run has taken, in seconds; before the first, what is assumed of it."""

    save_seconds: float
    """Seconds of a save: assumed at first, then the longest that was measured."""
    evaluation_in_steps: float
    """How many steps take as long as an evaluation, as is assumed until one was measured."""
    evaluation_seconds: float | None = None
    """Seconds of the longest evaluation; None: none was measured."""
    step_seconds: float = 0.0
    """Seconds of a step: of an earlier start at first, then the longest that was measured."""
    is_saving: bool = False
    """Whether a save is under way, for which the next one waits."""
    _is_save_measured: bool = False
    _num_steps: int = 0

    def stepped(self, seconds: float) -> None:
        """Note how long a step took. The first one compiles and warms up: it counts until there is a second one."""
        self.step_seconds = max(self.step_seconds, seconds) if self._num_steps > 1 else seconds
        self._num_steps += 1

    def saved(self, seconds: float) -> None:
        """Note how long a save took."""
        self.save_seconds = max(self.save_seconds, seconds) if self._is_save_measured else seconds
        self._is_save_measured = True

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self.evaluation_seconds = max(self.evaluation_seconds or 0.0, seconds)

    @property
    def reserve_seconds(self) -> float:
        """Seconds for two steps (the one that begins, and a longer one in its place), a save, an evaluation, an export.

        An export is taken to last as long as a save: it writes less.
        """
        evaluation = self.evaluation_seconds
        if evaluation is None:
            evaluation = self.evaluation_in_steps * self.step_seconds
        num_saves = 3 if self.is_saving else 2
        return 2 * self.step_seconds + num_saves * self.save_seconds + evaluation


def find_reached(
    limits: Mapping[str, float],
    used: Mapping[str, float | None],
    rates: Mapping[str, float],
    reserve_seconds: float,
) -> str | None:
    """Give the first budget of which less is left than the run uses in `reserve_seconds`; None: there is none.

    Args:
        limits: the limit of each budget, as `find_limits` gives them.
        used: what is used of each; None: not known before the first sum of energy.
        rates: what a second uses of each.
        reserve_seconds: seconds for what is still to be done.
    """
    for name, limit in limits.items():
        now = used[name]
        if now is not None and now + rates[name] * reserve_seconds >= limit:
            return name
    return None


class Budget(LineReader):
    """Stops a run at the first of its limits. A `RankFlag`; all ranks have it, and rank 0 decides.

    Args:
        config: the run's config, with the limits.
        usage: what this rank measures.
        recorder: writes the run's record, on rank 0; None on the others.
        num_parameters: number of parameters of the whole model.
        num_held_out: number of sequences of an evaluation.
    """

    def __init__(
        self, config: RunConfig, usage: Usage, recorder: RunRecorder | None, *, num_parameters: int, num_held_out: int
    ) -> None:
        self.stopped_by: str | None = None
        """Key of `train` whose budget is used up."""
        self._config, self._usage, self._recorder = config, usage, recorder
        self._limits = find_limits(config)
        num_bytes = num_parameters * _ASSUMED_BYTES_PER_PARAMETER
        assumed_seconds = _LEAST_SAVE_SECONDS + num_bytes / _ASSUMED_BYTES_PER_SECOND
        self._pace = Pace(assumed_seconds, math.ceil(num_held_out / config.train.global_batch_size))
        self._used: float | None = None
        """What was used of the budget that stopped the run, in its unit."""
        self._begin_seconds: float | None = None
        """When the step began, on the monotonic clock, moved on by what is no part of it; None: no step has begun."""
        self._end_seconds = 0.0
        """When the step, or what followed it, ended."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Check that what is limited is known, and learn from earlier starts how long things take; after `Usage`.

        Raises:
            ConfigError: a budget of energy, or of cost by the price of energy, where the energy is not known.
        """
        if not self._usage.is_known:
            self._check_needs_no_energy()
        if self._recorder is None:
            return
        if "max_kwh" in self._limits and "estimate" in (self._recorder.record.energy_source or ""):
            logger.warning("train.max_kwh limits what is partly an estimate: docs/cost.md")
        if self._limits:
            self._learn(RunFolder(self._recorder.run_dir))

    def _check_needs_no_energy(self) -> None:
        energy_budgets = ["max_kwh"] if self._config.cost.price_per_kwh is None else ["max_kwh", "max_cost"]
        for name in energy_budgets:
            if name in self._limits:
                what, found = "nobody knows the energy of this run's GPUs", f"{self._limits[name]:g}"
                hint = "pip install nvidia-ml-py; or cost.device_watts=700, the watts of one under load"
                raise ConfigError(what, where=f"train.{name}", found=found, allowed="null", hint=hint)

    def _learn(self, folder: RunFolder) -> None:
        """Read how long saves, evaluations and the last step took in earlier starts."""
        saves = [event for event in read_lines(folder.events) if event.get("event") == Event.save.value]
        lines = read_lines(folder.metrics)
        for seconds in _numbers(saves, "seconds"):
            self._pace.saved(seconds)
        for seconds in _numbers(lines, "eval_runtime"):
            self._pace.evaluated(seconds)
        step_seconds = _numbers(lines, "step_seconds")
        if step_seconds:
            self._pace.step_seconds = step_seconds[-1]

    def flag(self) -> int:
        """Give the number of the budget that ends the run with the step that begins; 0: none, or not on rank 0."""
        if self._recorder is None or not self._limits:
            return 0
        used = self._usage.find_used()
        reached = find_reached(self._limits, used, self._usage.find_rates(), self._pace.reserve_seconds)
        return 0 if reached is None else 1 + BUDGETS.index(reached)

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Let the Trainer save and stop after the step, and record by which budget; `flag` is its number."""
        if not stop_after_step(state, control):
            return
        name = self.stopped_by = BUDGETS[flag - 1]
        if self._recorder is None:
            return
        used, limit = self._usage.find_used()[name], self._limits[name]
        assert used is not None
        self._used = used
        values = {"used": used, "limit": limit}
        in_file = {key: to_iso(value) for key, value in values.items()} if name == "deadline" else values
        self._recorder.add(Event.budget, step=state.global_step, which=name, **in_file)
        words = [describe(name, value, self._config) for value in (used, limit)]
        logger.warning("train.%s: at %s of %s, saving after step %d, and stopping", name, *words, state.global_step)

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note how long the last step took, with the wait for data after it."""
        now = time.monotonic()
        if self._begin_seconds is not None:
            self._pace.stepped(now - self._begin_seconds)
        self._begin_seconds = now

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note when the step ended: an evaluation and a save after it are no part of it."""
        self._end_seconds = time.monotonic()

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note how long the evaluation took, with what other callbacks measure."""
        if self._begin_seconds is not None:
            self._pace.evaluated(self._leave_out())

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note that a save has begun; in the foreground it has ended, too."""
        self._leave_out()
        self._pace.is_saving = True

    def _leave_out(self) -> float:
        """Take the time since the end of the step out of the step's, and give it in seconds."""
        now = time.monotonic()
        seconds, self._end_seconds = now - self._end_seconds, now
        if self._begin_seconds is not None:
            self._begin_seconds += seconds
        return seconds

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Note how long a save took, on rank 0."""
        seconds = line.get("checkpoint/seconds")
        if seconds is not None:
            self._pace.saved(seconds)
            self._pace.is_saving = False

    def check(self) -> None:
        """Raise a BudgetError, if the run was stopped by one."""
        if self.stopped_by is not None:
            record = RunRecord(start=1) if self._recorder is None else self._recorder.record
            raise used_up(self._config, self.stopped_by, self._used, record)


def _numbers(lines: Sequence[Line], key: str) -> list[float]:
    """Give the numbers under a key; files of an earlier start may hold anything."""
    values = (line.get(key) for line in lines)
    return [float(value) for value in values if isinstance(value, (int, float)) and 0 < value <= sys.float_info.max]
