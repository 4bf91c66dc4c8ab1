"""What people and trackers read while a run trains: trackers, metrics.jsonl and the progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from transformers import TrainerCallback

from hfdist.run.callbacks.metrics import MetricsWriter, ProgressBar
from hfdist.run.callbacks.trackers import Trackers, ending_trackers
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState


class TrackersPart(Part):
    """Reports to the trackers of `report.to`."""

    joins = Joins.constructor

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Give the callbacks, which report on rank 0; a few on the first rank of each machine."""
        is_first_here = run.arguments.local_process_index == 0
        return [Trackers(run.config)] if run.config.report.to and is_first_here else []

    def during(self, run: RunState) -> AbstractContextManager[None]:
        """End the trackers' runs, also those of trackers that a recipe of your own has added."""
        return ending_trackers(run.trainer)


class MetricsPart(Part):
    """Writes metrics.jsonl."""

    joins = Joins.constructor

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Write on rank 0."""
        return [MetricsWriter(run.config.run.folder.metrics)]


class BarPart(Part):
    """Shows the progress bar."""

    joins = Joins.constructor

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Show it on rank 0."""
        return [ProgressBar()] if run.config.report.progress else []
