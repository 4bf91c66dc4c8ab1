"""A learning rate's schedule as JSON, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hfdist.errors import CheckpointError
from hfdist.optim.rates import set_rate

_SET_BY_SCHEDULES = ("lr", "betas", "momentum")
"""Settings of a group that a schedule may change."""


def schedule_state(scheduler: LRScheduler) -> dict[str, object]:
    """Give what `restore_schedule` needs, as JSON values. Most schedules are functions of the step alone."""
    state = None
    if not isinstance(scheduler, LambdaLR):
        groups = [{k: group[k] for k in _SET_BY_SCHEDULES if k in group} for group in scheduler.optimizer.param_groups]
        state = {"scheduler": scheduler.state_dict(), "groups": groups}
    return {"schedule_steps": getattr(scheduler, "last_epoch", None), "schedule": state}


def restore_schedule(scheduler: LRScheduler, saved: Mapping[str, Any]) -> None:
    """Put schedule and rates back to where `schedule_state` found them.

    Raises:
        CheckpointError: the schedule was of another kind.
    """
    steps, state = saved["schedule_steps"], saved.get("schedule")
    if (state is None) != isinstance(scheduler, LambdaLR):
        raise CheckpointError(
            "the checkpoint is of a learning rate's schedule of another kind",
            where="lr_scheduler_type",
            found=type(scheduler).__name__,
            hint="the schedule that the run began with",
        )
    if isinstance(scheduler, LambdaLR):
        rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        scheduler.last_epoch = steps
        scheduler._last_lr = rates
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            set_rate(group, float(rate))
    elif state is not None:
        scheduler.load_state_dict(_typed_as(scheduler.state_dict(), state["scheduler"]))
        for group, settings in zip(scheduler.optimizer.param_groups, state["groups"], strict=True):
            group.update(_typed_as(group, settings))


def _typed_as(model: object, value: object) -> Any:
    """Undo what JSON does to a value that was like `model`: keys become texts, tuples lists, counters dicts."""
    if isinstance(model, dict) and isinstance(value, dict):
        keys = {str(key): key for key in model}
        typed = {keys.get(key, key): _typed_as(model.get(keys.get(key, key)), item) for key, item in value.items()}
        # A copy keeps what a dict has besides its items, such as the default of a defaultdict.
        emptied = copy.copy(model)
        emptied.clear()
        emptied.update(typed)
        return emptied
    if isinstance(model, (list, tuple)) and isinstance(value, list):
        models = [*model, *[None] * (len(value) - len(model))]
        return type(model)(_typed_as(*pair) for pair in zip(models, value, strict=False))
    return value
