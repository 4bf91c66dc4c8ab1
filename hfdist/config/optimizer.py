"""`optimizer.*`: the update rule and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from hfdist.config.ranges import limited


class Package(NamedTuple):
    """A library of optimizers."""

    name: str
    """Name of the package for pip."""
    module: str


_PACKAGES = {
    "adamw_torch_": Package("torchao", "torchao"),
    "schedule_free_": Package("schedulefree", "schedulefree"),
    "grokadamw": Package("grokadamw", "grokadamw"),
    "stable_adamw": Package("torch-optimi", "optimi"),
}
_BITSANDBYTES = Package("bitsandbytes", "bitsandbytes")


class OptimizerName(Enum):
    """The update rule: AdamW, Muon (with AdamW for what is no matrix), or one by transformers' name for it."""

    adamw = "adamw"
    muon = "muon"
    sgd = "sgd"
    adagrad = "adagrad"
    rmsprop = "rmsprop"
    adafactor = "adafactor"
    schedule_free_adamw = "schedule_free_adamw"
    schedule_free_radam = "schedule_free_radam"
    schedule_free_sgd = "schedule_free_sgd"
    stable_adamw = "stable_adamw"
    grokadamw = "grokadamw"
    adamw_torch_4bit = "adamw_torch_4bit"
    adamw_torch_8bit = "adamw_torch_8bit"
    adamw_8bit = "adamw_8bit"
    adamw_bnb_8bit = "adamw_bnb_8bit"
    paged_adamw_32bit = "paged_adamw_32bit"
    paged_adamw_8bit = "paged_adamw_8bit"
    ademamix = "ademamix"
    ademamix_8bit = "ademamix_8bit"
    paged_ademamix_32bit = "paged_ademamix_32bit"
    paged_ademamix_8bit = "paged_ademamix_8bit"
    lion_32bit = "lion_32bit"
    lion_8bit = "lion_8bit"
    paged_lion_32bit = "paged_lion_32bit"
    paged_lion_8bit = "paged_lion_8bit"
    rmsprop_bnb = "rmsprop_bnb"
    rmsprop_bnb_8bit = "rmsprop_bnb_8bit"
    rmsprop_bnb_32bit = "rmsprop_bnb_32bit"

    @property
    def package(self) -> Package | None:
        """The library that has it; None: torch or transformers."""
        for start, package in _PACKAGES.items():
            if self.value.startswith(start):
                return package
        return _BITSANDBYTES if any(word in self.value for word in ("bit", "bnb", "ademamix")) else None

    @property
    def is_schedule_free(self) -> bool:
        """Whether it averages weights in place of a falling rate, and warms up by itself."""
        return self.value.startswith("schedule_free_")


class Schedule(Enum):
    """Shape of the learning rate after warm-up."""

    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"


@dataclass(kw_only=True)
class OptimizerChange:
    """Other values after a step; None: as before."""

    step: int = limited(at_least=1)
    lr: float | None = limited(None, above=0)
    weight_decay: float | None = limited(None, at_least=0)
    beta1: float | None = limited(None, at_least=0, at_most=0.9999999)
    beta2: float | None = limited(None, at_least=0, at_most=0.9999999)
    eps: float | None = limited(None, above=0)


PRETRAINING_RATE = 3e-4
"""Peak learning rate of a model that begins with random weights."""
CHANGEABLE = tuple(one.name for one in fields(OptimizerChange) if one.name != "step")
"""Keys whose values may change while a model is trained."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """Weight decay is applied to matrices only (parameters with two dimensions or more)."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule: adamw, muon, sgd, adafactor, ...: see docs/optimizers.md."""
    plugin: str | None = None
    """In place of name: what an installed package offers, by its entry point in hfdist.optimizers."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further settings of the optimizer's class, such as {momentum: 0.9} of sgd."""
    lr: float | None = limited(PRETRAINING_RATE, above=0)
    """Peak learning rate; null: by the task and the adapter.

    None: by what is trained, until the config is complete.
    """
    base_width: int | None = limited(None, at_least=1)
    """Width (hidden_size) at which lr was found: hidden matrices take lr x base_width / hidden_size."""
    beta1: float = limited(0.9, at_least=0, at_most=0.9999999)
    """Decay of the mean of gradients."""
    beta2: float = limited(0.95, at_least=0, at_most=0.9999999)
    """Decay of the mean of squared gradients."""
    eps: float = limited(1e-8, above=0)
    """What is added to the root of the mean of squared gradients."""
    weight_decay: float = limited(0.1, at_least=0)
    """Decay of weights, of matrices only."""
    fused: bool = True
    """adamw: whether one kernel updates all parameters."""
    schedule: Schedule = Schedule.cosine
    """Shape of the rate after warm-up: cosine | wsd (warm-up, stable, decay) | linear | constant."""
    warmup_steps: int = limited(0, at_least=0)
    """Steps over which the rate rises to lr."""
    warmup_tokens: int | None = limited(None, at_least=0)
    """In place of warmup_steps: tokens, rounded up to whole steps."""
    warmup_fraction: float | None = limited(None, at_least=0, at_most=0.9)
    """In place of warmup_steps: share of all steps."""
    decay_fraction: float = limited(0.2, above=0, at_most=1)
    """wsd: last share of the steps, over which the rate falls."""
    min_lr_ratio: float | None = limited(None, at_least=0, at_most=1)
    """cosine, wsd: last rate as a share of lr; null: 0.1."""
    changes: list[OptimizerChange] = field(default_factory=list)
    """Other values after a step: [{step: 200, lr: 1.0e-3}]; also weight_decay, beta1, beta2, eps."""
