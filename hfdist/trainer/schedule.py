"""The learning rate's schedule in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from hfdist.errors import CheckpointError

# A scheduler is Any here: that of a plateau is of another class than the others.


def state_of(scheduler: Any) -> dict[str, Any]:
    """Give what `restore` needs, as JSON values. Most schedules are functions of the step alone."""
    own = None if _is_function_of_steps(scheduler) else scheduler.state_dict()
    return {"schedule_steps": scheduler.last_epoch, "schedule": own}


def restore(scheduler: Any, state: dict[str, Any]) -> None:
    """Put the schedule and the rates back to where `state_of` found them.

    Raises:
        CheckpointError: the checkpoint is of a schedule of another kind.
    """
    steps, own = state["schedule_steps"], state.get("schedule")
    if (own is None) != _is_function_of_steps(scheduler):
        raise CheckpointError(
            "the checkpoint is of a learning rate's schedule of another kind",
            where="lr_scheduler_type",
            found=type(scheduler).__name__,
            hint="the schedule that the run began with",
        )
    if own is None:
        rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        scheduler.last_epoch = steps
        scheduler._last_lr = rates
    else:
        scheduler.load_state_dict(own)
        rates = scheduler.get_last_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _is_function_of_steps(scheduler: Any) -> bool:
    return isinstance(scheduler, LambdaLR)
