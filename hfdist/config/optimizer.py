"""`optimizer.*`: AdamW and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hfdist.config.limits import limited


class OptimizerName(Enum):
    """The update rule."""

    adamw = "adamw"


class Schedule(Enum):
    """Shape of the learning rate after warm-up."""

    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"


@dataclass(kw_only=True)
class OptimizerConfig:
    """Weight decay is applied to matrices only (parameters with two dimensions or more)."""

    name: OptimizerName = OptimizerName.adamw
    lr: float = limited(3e-4, above=0)
    """Peak learning rate."""
    beta1: float = limited(0.9, at_least=0, at_most=0.9999999)
    beta2: float = limited(0.95, at_least=0, at_most=0.9999999)
    eps: float = limited(1e-8, above=0)
    weight_decay: float = limited(0.1, at_least=0)
    fused: bool = True
    """Update all parameters in one kernel of torch's."""
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = limited(0, at_least=0)
    warmup_tokens: int | None = limited(None, at_least=0)
    """Warm-up length in tokens instead of steps; rounded up to whole steps."""
    warmup_fraction: float | None = limited(None, at_least=0, at_most=0.9)
    """Warm-up length as a share of all steps; rounded up to whole steps."""
    decay_fraction: float = limited(0.2, above=0, at_most=1)
    """wsd: the last share of the steps, over which the rate falls."""
    min_lr_ratio: float | None = limited(None, at_least=0, at_most=1)
    """cosine and wsd: the last learning rate as a share of `lr`; null: 0.1."""
