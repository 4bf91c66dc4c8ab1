"""All batch arithmetic: from the two sizes that a user gives to every number that the libraries want.

global_batch = micro_batch * num_microbatches * data_size          (sequences)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.config.optimizer import OptimizerConfig
from hfdist.errors import ConfigError

IGNORED = -100
"""Label of a position that is not a target."""
_MOST_TRIED = 100_000
"""Largest micro batch that is tried for a hint: the time for all that a config may name has no bound."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How one optimizer step is divided. Sizes in sequences."""

    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    """Forwards of one data rank in one step; equals gradient accumulation where there is no pipeline."""
    data_size: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads, over all processes."""
        return self.global_batch_size * self.sequence_length


def plan_batch(
    *, global_batch_size: int, micro_batch_size: int, data_size: int, sequence_length: int, lanes: int, islands: int = 1
) -> BatchPlan:
    """Divide the global batch over data ranks and micro batches; ConfigError: a size does not divide.

    `islands` is how many runs of so many data ranks share the lanes.
    """
    readers = data_size * islands
    if lanes % readers != 0:
        what = "the data ranks cannot share the lanes of the stream evenly"
        found = f"{lanes} lanes for {data_size} data ranks" + (f" of each of {islands} islands" if islands > 1 else "")
        allowed = f"a multiple of {readers} (the order of the data depends on it: fix it at the start of a run)"
        hint = f"data.lanes={nearest_multiples(lanes, readers)[-1]}"
        raise ConfigError(what, where="data.lanes", found=found, allowed=allowed, hint=hint)
    unit = micro_batch_size * data_size
    if global_batch_size % unit != 0:
        near = nearest_multiples(global_batch_size, unit)
        smaller = range(min(micro_batch_size, _MOST_TRIED), 0, -1)
        micro = next((size for size in smaller if global_batch_size % (size * data_size) == 0), None)
        what = f"the global batch does not divide into micro batches of {micro_batch_size} on {data_size} data ranks"
        allowed = f"a multiple of {unit}; nearest: {' or '.join(map(str, near))}"
        hint = f"train.global_batch_size={near[-1]}" + ("" if micro is None else f", or train.micro_batch_size={micro}")
        raise ConfigError(what, where="train.global_batch_size", found=global_batch_size, allowed=allowed, hint=hint)
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_microbatches=global_batch_size // unit,
        data_size=data_size,
        sequence_length=sequence_length,
    )


def nearest_multiples(value: int, unit: int) -> list[int]:
    """Give the multiples of `unit` just below and above `value`, without zero."""
    below = value // unit * unit
    return [m for m in (below, below + unit) if m > 0]


def num_warmup_steps(optimizer: OptimizerConfig, *, tokens_per_step: int, max_steps: int) -> int:
    """Length of the warm-up in steps, given in steps, in tokens, or as a share of all steps, though never all."""
    if optimizer.warmup_fraction:
        return min(math.ceil(optimizer.warmup_fraction * max_steps), max_steps - 1)
    # None and 0 both leave it to the next one: only one of the three is more.
    if not optimizer.warmup_tokens:
        return optimizer.warmup_steps
    return math.ceil(optimizer.warmup_tokens / tokens_per_step)
