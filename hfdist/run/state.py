"""What the steps of a run have made so far, for its later steps and for its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

from hfdist.checkpoint.mirror import Uploader
from hfdist.config.run import RunConfig
from hfdist.control_group import ControlGroup
from hfdist.data import PoolReport
from hfdist.errors import HfdistError
from hfdist.planning.plan import Plan
from hfdist.records import RunRecorder
from hfdist.run.budget import Budget
from hfdist.run.data import RunData
from hfdist.run.own_plan import OwnPlan
from hfdist.run.usage import Usage
from hfdist.strategies.base import Strategy
from hfdist.topology import Topology
from hfdist.trainer.checkpointing.start import Start
from hfdist.trainer.evaluation.loop import Measure
from hfdist.trainer.fault_tolerance.preemption import Preemption
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.trainer import Trainer


class Outcome(NamedTuple):
    """A model that was trained, measured and written."""

    folder: Path
    """The folder that a user opens: the model, or the adapter alone."""
    step: int
    """Step of the weights in the folder."""
    loss: float | None
    """Loss of these weights on held-out data; None: nothing is held out."""
    pools: Sequence[PoolReport]
    """How much of each pool was read."""
    peak_bytes: Sequence[Mapping[str, float]]
    """The most memory that each rank has used, by kind."""


class RunState:
    """The attributes of a run. Each step sets some; before its step, an attribute without a value is not there."""

    config: RunConfig
    topology: Topology
    strategy: Strategy
    architecture: PreTrainedConfig
    """The model's own config; set by `find_model`, as the next one."""
    why_together: str | None = None
    """Why packed documents are not computed one by one; None: they are, or another attention was chosen."""
    data: RunData
    """Set by `open_data`."""
    recorder: RunRecorder | None = None
    """Set by `open_folder`, on rank 0."""
    uploader: Uploader | None = None
    """Sends checkpoints to the mirror; set by `open_folder`, on rank 0."""
    arguments: TrainingArguments
    """Set by `start_ranks`, as the next two."""
    patient: ControlGroup | None = None
    """The group in which ranks with nothing left to do wait for the end of the run; None: there is one process."""
    own_plan: OwnPlan | None = None
    """A plan that is being made, on rank 0."""
    model: PreTrainedModel
    """Set by `build_model`."""
    objective: Objective | None
    """Set by `build_trainer`, as the next four; None: the run trains next tokens."""
    measures: Sequence[Measure] = ()
    """Functions that measure something besides the loss at an evaluation."""
    usage: Usage
    trainer: Trainer
    plan: Plan | None = None
    """Set on rank 0."""
    start: Start
    """Set by `train`, as all that follow."""
    preemption: Preemption
    budget: Budget
    first_step: Event
    """Set when the first step has ended."""
    outcome: Outcome
    not_uploaded: HfdistError | None = None
    """Why the upload of the model has failed, on rank 0."""
