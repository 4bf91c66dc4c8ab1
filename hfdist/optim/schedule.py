"""The learning rate of each step: a config's schedule in the words of transformers, and as a function of the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler

from hfdist.config.optimizer import OptimizerConfig, Schedule


def scheduler_of(optimizer: OptimizerConfig, max_steps: int) -> tuple[str, dict[str, object]]:
    """Give the values of TrainingArguments that make a config's schedule: `lr_scheduler_type`, `lr_scheduler_kwargs`.

    Args:
        optimizer: `optimizer.*`.
        max_steps: number of the run's steps.
    """
    min_lr_ratio = 0.1 if optimizer.min_lr_ratio is None else optimizer.min_lr_ratio
    match optimizer.schedule:
        case Schedule.cosine:
            return "cosine_with_min_lr", {"min_lr_rate": min_lr_ratio}
        case Schedule.wsd:
            num_decay_steps = max(1, round(max_steps * optimizer.decay_fraction))
            return "warmup_stable_decay", {"num_decay_steps": num_decay_steps, "min_lr_ratio": min_lr_ratio}
        case Schedule.linear:
            return "linear", {}
        case Schedule.constant:
            # Schedule-free optimizers warm up by themselves.
            return "constant" if optimizer.name.is_schedule_free else "constant_with_warmup", {}


def rate_at(optimizer: OptimizerConfig, max_steps: int) -> Callable[[int], float]:
    """Give a function from the number of steps so far to the learning rate of the next one, as a Trainer has it.

    Args:
        optimizer: `optimizer.*` with a rate; of the keys of the warm-up, `warmup_steps` alone counts.
        max_steps: number of the run's steps.
    """
    kind, settings = scheduler_of(optimizer, max_steps)
    peak = optimizer.lr
    assert peak is not None, "a complete config has a rate"
    # transformers makes schedules for an optimizer only; this one is never stepped.
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = get_scheduler(kind, stand_in, optimizer.warmup_steps, max_steps, scheduler_specific_kwargs=settings)
    [factor_at] = scheduler.lr_lambdas
    return lambda step: peak * float(factor_at(step))
