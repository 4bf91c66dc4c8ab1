"""`train.*`: steps, batch sizes, precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from hfdist.config.ranges import LIMIT, Limit, limited


def parse_time(text: str) -> datetime:
    """Read a time as ISO 8601; without a time zone it is that of this machine. ValueError: it is none."""
    time = datetime.fromisoformat(text)
    return time.astimezone() if time.tzinfo is None else time


def _is_time(text: str) -> bool:
    try:
        parse_time(text)
    except (ValueError, OverflowError):
        return False
    return True


_DEADLINE = Limit("a time as ISO 8601, such as 2030-01-31T18:00 or 2030-01-31T18:00+01:00", _is_time)


class Precision(Enum):
    """Type of the arithmetic; the optimizer always keeps float32 masters."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    """bf16, but products of the blocks' linear layers are of float8 numbers (models/float8.py)."""

    @property
    def is_bf16(self) -> bool:
        """Whether autocast computes in bfloat16, in float8 runs what is left to it."""
        return self in (Precision.bf16, Precision.fp8)


class Compile(Enum):
    """What `torch.compile` is applied to; `auto`: the blocks on a GPU, without a pipeline or ZeRO-3, else nothing."""

    auto = "auto"
    none = "none"
    blocks = "blocks"
    model = "model"


class Recompute(Enum):
    """What gradient checkpointing computes again: `all` of a block, or what is `cheap`.

    cheap: not the attention, and not every second matrix product, whose outputs are kept.
    """

    all = "all"
    cheap = "cheap"


@dataclass(kw_only=True)
class TrainConfig:
    """What a step is and how many there are."""

    max_steps: int | None = limited(100, at_least=1)
    """Optimizer steps at the most; null: as many as the epochs take."""
    epochs: int | None = limited(None, at_least=1)
    """Passes over the data at the most; their steps are counted beforehand; null: no limit.

    The learning rate falls over just as many steps. It is the limit of each source that gives none.
    """
    max_hours: float | None = limited(None, above=0)
    """Most hours of all starts; then the run saves, evaluates, exports, and ends with exit code 8."""
    max_cost: float | None = limited(None, above=0)
    """Highest cost of all starts, by the prices of cost.*; then the run ends as with max_hours."""
    max_kwh: float | None = limited(None, above=0)
    """Most energy of all starts; then the run ends as with max_hours."""
    deadline: str | None = field(default=None, metadata={LIMIT: _DEADLINE})
    """Time by which the run has ended, as with max_hours: 2030-01-31T18:00 (of this machine), ...T18:00+01:00."""
    global_batch_size: int = limited(32, at_least=1)
    """Sequences in one optimizer step, over all processes; their number does not change it."""
    micro_batch_size: int = limited(8, at_least=1)
    """Sequences in one forward of one data rank: bounded by memory."""
    eval_every: int | None = limited(None, at_least=1)
    """Steps between evaluations; null: only at the end."""
    eval_micro_batch_size: int | None = limited(None, at_least=1)
    """Sequences in one forward of an evaluation; null: micro_batch_size; does not change the result."""
    precision: Precision = Precision.fp32
    """Arithmetic: fp32 | bf16 | fp16 (with loss scaling) | fp8; the optimizer keeps float32 masters."""
    max_grad_norm: float = limited(1.0, above=0)
    """Gradients of a larger global norm are scaled down to it."""
    max_skipped_steps: int = limited(3, at_least=1)
    """Steps in a row without a finite loss and gradient; then back to the last checkpoint."""
    max_rollbacks: int = limited(2, at_least=0)
    """How often a run goes back to a checkpoint without getting beyond the step that failed; then exit code 5."""
    compare_replicas_every: int | None = limited(100, at_least=1)
    """Steps between comparisons of weights that several processes hold alike; null: none, as on unlike machines."""
    seed: int = limited(0, at_least=0)
    """Seed of random weights and dropout."""
    compile: Compile = Compile.auto
    """What is compiled: auto (blocks on a GPU, without a pipeline or ZeRO-3) | none | blocks | model."""
    gradient_checkpointing: bool = False
    """Whether only the blocks' inputs are kept, and the rest is computed again."""
    recompute: Recompute = Recompute.all
    """What gradient_checkpointing computes again: all | cheap (keeps attention and half of the products)."""
    activation_offload: bool = False
    """Whether the blocks' inputs of gradient_checkpointing wait for the backward in host memory."""
    freeze: list[str] = field(default_factory=list)
    """Shell-style patterns of parameter names that are not trained: ['model.layers.[0-3].*']."""
    train_only: list[str] = field(default_factory=list)
    """Patterns of the only parameters that are trained; empty: all (with an adapter: all of the adapter)."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further fields of transformers' TrainingArguments, checked against it."""

    @property
    def is_checkpointed_by_trainer(self) -> bool:
        """Whether transformers' own activation checkpointing is all that is wanted."""
        return self.gradient_checkpointing and self.recompute is Recompute.all and not self.activation_offload
