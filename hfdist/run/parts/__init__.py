"""All parts of a run, in their order."""

from __future__ import annotations

from hfdist.run.parts.budget import BudgetPart, UsagePart
from hfdist.run.parts.card import CardPart, PicturePart
from hfdist.run.parts.evaluation import EvaluatorsPart, ObjectivePart
from hfdist.run.parts.folder import FolderPart
from hfdist.run.parts.lines import BarPart, MetricsPart, TrackersPart
from hfdist.run.parts.measured import PlanPart, RanksPart, TimelinePart, TrafficPart
from hfdist.run.parts.mirror import MirrorPart
from hfdist.run.parts.part import Part
from hfdist.run.parts.sample import SamplePart
from hfdist.run.parts.screen import ScreenPart
from hfdist.run.parts.tasks import TasksPart
from hfdist.run.parts.training import (
    FirstStepPart,
    OptimizerChangesPart,
    PreemptionPart,
    RecordPart,
    WatchPart,
)
from hfdist.run.parts.upload import UploadPart

PARTS: tuple[type[Part], ...] = (
    # Opens the folder: before UploadPart, which speaks with the Hub. Its callback goes before all others.
    FolderPart,
    # ---- given to the Trainer ----
    # Before MetricsPart, which moves lines away that trackers read first; before WatchPart, which may give another
    # error in place of one that trackers are told.
    TrackersPart,
    MetricsPart,
    BarPart,
    # Before WatchPart, because early stopping decides what follows an evaluation.
    EvaluatorsPart,
    ObjectivePart,
    # Before BudgetPart, which takes its figures; before RecordPart, whose first writing has the sources of energy.
    UsagePart,
    # ---- once the Trainer is built ----
    # Before RecordPart, which records no start that is refused.
    OptimizerChangesPart,
    TimelinePart,
    # Before PlanPart, which reads the last lines of ranks.
    RanksPart,
    TrafficPart,
    PlanPart,
    # ---- where the training begins ----
    # Both before WatchPart: they decide what follows a step.
    PreemptionPart,
    # Before RecordPart, which records no start that is refused.
    BudgetPart,
    WatchPart,
    RecordPart,
    # Last: the start ends once all others have seen a step.
    FirstStepPart,
    # ---- at the end ----
    SamplePart,
    # Before CardPart, which shows the picture.
    PicturePart,
    # Before UploadPart, which uploads the card.
    CardPart,
    # Before TasksPart, which may take hours.
    UploadPart,
    TasksPart,
    # After them: it waits for an upload that goes on meanwhile.
    MirrorPart,
    # Last: it is what a user reads.
    ScreenPart,
)
"""What a run does or reports beside the training: in the order of its callbacks, and of what it does at its end."""
