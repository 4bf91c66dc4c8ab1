"""What keeps a training in order: changed rates, signals, the watch, the record, the end of the start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Event

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.config.run import RunConfig
from hfdist.run.callbacks.record_writer import RecordWriter
from hfdist.run.optimizer_changes import OptimizerChanges, check_changes
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState
from hfdist.topology import Topology
from hfdist.trainer.fault_tolerance.preemption import Preemption
from hfdist.watch.callback import Watch


class OptimizerChangesPart(Part):
    """Changes rates after some steps, as `optimizer.changes` says."""

    def check(self, config: RunConfig, topology: Topology) -> None:
        """Check that the optimizer has the values that change."""
        if config.optimizer.changes:
            check_changes(config.optimizer)

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Change them, if there are changes."""
        optimizer = run.config.optimizer
        return [OptimizerChanges(optimizer)] if optimizer.changes else []


class PreemptionPart(Part):
    """Stops the run after a signal, saved."""

    joins = Joins.training

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Set `run.preemption`. Without checkpoints, a run that is stopped saves nothing, and none listens."""
        run.preemption = Preemption()
        return [] if run.config.checkpoint.every is None else [run.preemption]


class WatchPart(Part):
    """Ends the run when a rank is dead, hung or cut off."""

    joins = Joins.training
    _watch: Watch

    def during(self, run: RunState) -> AbstractContextManager[object]:
        """Watch until the run has ended."""
        self._watch = Watch(run.config.run.dir, run.config.watch.heartbeat_seconds)
        return self._watch

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Mark the progress."""
        return [self._watch]


class RecordPart(Part):
    """Writes the record of the run."""

    joins = Joins.training

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Write where the run has begun, and what happens."""
        return [RecordWriter(run.recorder, run.start)]


class FirstStepPart(Part):
    """Ends the report of the start."""

    joins = Joins.training

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """End it with the first step."""
        return [FirstStep(run.first_step)]


class FirstStep(TrainerCallback):
    """Sets an event after a step."""

    def __init__(self, ended: Event) -> None:
        self._ended = ended

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Set it; later steps move the bar."""
        self._ended.set()
