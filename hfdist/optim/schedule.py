"""The learning rate of each step: a schedule by transformers' name for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler

from hfdist.config.optimizer import OptimizerConfig, Schedule


def scheduler_of(optimizer: OptimizerConfig, max_steps: int) -> tuple[str, dict[str, object]]:
    """Give `lr_scheduler_type` and `lr_scheduler_kwargs`."""
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
    """Give the rate by the number of steps before, as a Trainer has it; `warmup_steps` alone is the warm-up."""
    kind, settings = scheduler_of(optimizer, max_steps)
    peak = optimizer.lr
    assert peak is not None, "of a complete config"
    made = torch.optim.SGD([torch.zeros(1)], lr=peak)
    warmup, steps = optimizer.warmup_steps, max_steps
    scheduler = get_scheduler(kind, made, warmup, steps, scheduler_specific_kwargs=settings)
    of_step = scheduler.lr_lambdas[0]
    return lambda step: peak * float(of_step(step))
