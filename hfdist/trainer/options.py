"""What a run asks of its Trainer besides TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hfdist.checkpoint import Keep
from hfdist.models.loss import LossHead
from hfdist.trainer.fault_tolerance.nonfinite_steps import Limits


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Given to the constructor, and never changed; the defaults are those of a Trainer from Python."""

    run_values: dict[str, Any] | None = None
    """The config of the run, if it has one: kept in each checkpoint, to compare with at a resume."""
    keep: Keep | None = None
    """Which checkpoints stay; None: as many as `args.save_total_limit` says."""
    save_in_background: bool = True
    """Whether training goes on from a copy in memory while a checkpoint is written."""
    loss_head: LossHead | None = None
    """Computes training losses without whole logits; None: the model computes them."""
    limits: Limits = field(default_factory=Limits)
    """How many steps may be skipped, and how often the run goes back."""
