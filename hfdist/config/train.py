"""`train.*`: steps, batch sizes, precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hfdist.config.ranges import limited


class Precision(Enum):
    """Type of the arithmetic; the optimizer always keeps float32 masters."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


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
    """Optimizer steps at the most; null: `epochs` ends the run."""
    epochs: int | None = limited(None, at_least=1)
    """Passes over the data at the most. The steps that they take are counted beforehand, so that the learning rate
    falls over just as many. It is the limit of each source that gives none."""
    global_batch_size: int = limited(32, at_least=1)
    """Sequences in one optimizer step, over all processes."""
    micro_batch_size: int = limited(8, at_least=1)
    """Sequences in one forward of one data rank."""
    eval_every: int | None = limited(None, at_least=1)
    """Steps between evaluations; null: only at the end."""
    eval_micro_batch_size: int | None = limited(None, at_least=1)
    """Sequences in one evaluation forward; null: `micro_batch_size`. Does not change the result."""
    precision: Precision = Precision.fp32
    max_grad_norm: float = limited(1.0, above=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_steps: int = limited(3, at_least=1)
    """Steps without a finite loss and gradient, one behind the other, after which the run goes back to its last
    checkpoint."""
    max_rollbacks: int = limited(2, at_least=0)
    """How often it goes back without getting beyond the step that failed, before it stops."""
    compare_replicas_every: int | None = limited(100, at_least=1)
    """Steps between comparisons of parameters that several processes hold, also made before each save; null: none."""
    seed: int = limited(0, at_least=0)
    """Of random weights and dropout."""
    compile: Compile = Compile.auto
    gradient_checkpointing: bool = False
    """Keep only the blocks' inputs and compute the rest again in the backward."""
    recompute: Recompute = Recompute.all
    """How much of it, with `gradient_checkpointing`."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of names of parameters that are not trained, such as `model.embed_tokens.*`."""
    train_only: list[str] = field(default_factory=list)
    """Patterns of names of the only parameters that are trained; empty: all."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further fields of transformers' TrainingArguments, checked against its dataclass."""
