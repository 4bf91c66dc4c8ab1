"""The learning rate's schedule in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from hfdist.errors import CheckpointError

# A scheduler is Any here: that of a plateau is of another class than the others.

_SET_BY_SCHEDULES = ("lr", "betas", "momentum")


def state_of(scheduler: Any) -> dict[str, Any]:
    """Give what `restore` needs, as JSON values. Most schedules are functions of the step alone."""
    own = None
    if not _is_function_of_steps(scheduler):
        own = {
            "scheduler": scheduler.state_dict(),
            "groups": [
                {name: group[name] for name in _SET_BY_SCHEDULES if name in group}
                for group in scheduler.optimizer.param_groups
            ],
        }
    return {"schedule_steps": getattr(scheduler, "last_epoch", None), "schedule": own}


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
        own = {"groups": [{"lr": rate} for rate in rates]}
    else:
        scheduler.load_state_dict(_typed_as(scheduler.state_dict(), own["scheduler"]))
    for group, saved in zip(scheduler.optimizer.param_groups, own["groups"], strict=True):
        group.update(_typed_as(group, saved))


def _is_function_of_steps(scheduler: Any) -> bool:
    return isinstance(scheduler, LambdaLR)


def _typed_as(model: Any, value: Any) -> Any:
    """Undo what JSON does to a value that was like `model`: keys become texts, tuples lists, counters dicts."""
    if isinstance(model, dict) and isinstance(value, dict):
        keys = {str(key): key for key in model}
        typed = {keys.get(key, key): _typed_as(model.get(keys.get(key, key)), own) for key, own in value.items()}
        return typed if type(model) is dict else type(model)(typed)
    if isinstance(model, (list, tuple)) and isinstance(value, list):
        models = [*model, *[None] * (len(value) - len(model))]
        return type(model)(_typed_as(*pair) for pair in zip(models, value, strict=False))
    return value
