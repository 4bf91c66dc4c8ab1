"""What watches the training itself: timeline, times of ranks with alerts, traffic, the grade of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import TrainerCallback

from hfdist.config.data import cache_dir
from hfdist.planning.machines import STEPS
from hfdist.run.callbacks.alerts import Alerts
from hfdist.run.callbacks.metrics import TimelineWriter
from hfdist.run.callbacks.plan_grader import PlanGrader
from hfdist.run.callbacks.rank_times import RankTimes
from hfdist.run.callbacks.traffic import Traffic
from hfdist.run.own_plan import runtime_bytes, take_plan
from hfdist.run.parts.part import Part
from hfdist.run.state import RunState
from hfdist.watch.heartbeat import SAVING


class TimelinePart(Part):
    """Writes the measured schedule of a pipeline."""

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Give the callback that writes the timeline, if it is asked for."""
        assert run.trainer.engine is not None
        return [TimelineWriter(run.config.run.folder, run.trainer.engine)] if run.config.report.timeline else []


class RanksPart(Part):
    """Writes ranks.jsonl, and tells of alerts."""

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Give the times of ranks, and after them the alerts, which judge their lines."""
        config, trainer, path = run.config, run.trainer, run.config.run.folder.ranks
        if run.recorder is None or not config.report.alerts:
            return [RankTimes(path, trainer.throughput)]
        alerts = Alerts(run.recorder, config.checkpoint, config.report.alert_command, trainer.log)
        return [RankTimes(path, trainer.throughput, alerts.see_ranks), alerts]


class TrafficPart(Part):
    """Counts what each rank sends in one step."""

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Give the callback that counts traffic once no save is under way."""
        trainer = run.trainer

        def wait() -> None:
            with trainer.training.waiting(SAVING):
                trainer.checkpointer.wait()

        config = run.config
        return [
            Traffic(
                run.topology,
                run.recorder,
                wait=wait,
                warm_up_steps=config.strategy.num_uncompressed_steps,
                reads_twice=config.task.name.traits.reads_twice,
            )
        ]


class PlanPart(Part):
    """Takes the plan that was made beside the start, and grades it."""

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Set `run.plan`."""
        config, engine = run.config, run.trainer.engine
        assert engine is not None
        runtime = runtime_bytes(engine, run.arguments.device) if config.report.plan else None
        if run.own_plan is not None:
            run.plan = take_plan(run.own_plan, config, runtime_bytes=runtime, max_steps=run.arguments.max_steps)
        if not config.report.plan:
            return []
        return [
            PlanGrader(
                run.plan,
                config.run.folder,
                engine,
                runtime_bytes=runtime,
                recorder=run.recorder,
                steps=cache_dir(config.data) / STEPS,
            )
        ]
