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
    epochs: int | None = limited(None, at_least=1)
    """Passes over the data at the most. The steps that they take are counted beforehand, so that the learning rate
    falls over just as many. It is the limit of each source that gives none."""
    max_hours: float | None = limited(None, above=0)
    max_cost: float | None = limited(None, above=0)
    max_kwh: float | None = limited(None, above=0)
    deadline: str | None = field(default=None, metadata={LIMIT: _DEADLINE})
    global_batch_size: int = limited(32, at_least=1)
    micro_batch_size: int = limited(8, at_least=1)
    eval_every: int | None = limited(None, at_least=1)
    eval_micro_batch_size: int | None = limited(None, at_least=1)
    precision: Precision = Precision.fp32
    max_grad_norm: float = limited(1.0, above=0)
    max_skipped_steps: int = limited(3, at_least=1)
    max_rollbacks: int = limited(2, at_least=0)
    compare_replicas_every: int | None = limited(100, at_least=1)
    seed: int = limited(0, at_least=0)
    compile: Compile = Compile.auto
    gradient_checkpointing: bool = False
    recompute: Recompute = Recompute.all
    activation_offload: bool = False
    """Whether the blocks' inputs, which gradient checkpointing keeps, wait for the backward in host memory."""
    freeze: list[str] = field(default_factory=list)
    train_only: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_checkpointed_by_trainer(self) -> bool:
        """Whether transformers' own activation checkpointing is all that is wanted."""
        return self.gradient_checkpointing and self.recompute is Recompute.all and not self.activation_offload
