"""The learning rate's schedule and the log's history in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from hfdist.errors import CheckpointError

# A scheduler is Any here: that of a plateau is of another class than the others.

NUM_ENTRIES = 1000
"""Evaluations that a checkpoint holds at most, and other entries; metrics.jsonl has all of them."""

_SET_BY_SCHEDULES = ("lr", "betas", "momentum")


def newest_entries(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the newest `NUM_ENTRIES` evaluations and the newest `NUM_ENTRIES` other entries, in their order."""
    kept: list[dict[str, Any]] = []
    numbers = {True: 0, False: 0}
    for entry in reversed(log_history):
        is_evaluation = "eval_loss" in entry
        numbers[is_evaluation] += 1
        if numbers[is_evaluation] <= NUM_ENTRIES:
            kept.append(entry)
    return kept[::-1]


def drop_old(log_history: list[dict[str, Any]]) -> None:
    """Take older entries out of the list itself once it holds four times as many: less often than with each entry."""
    if len(log_history) >= 4 * NUM_ENTRIES:
        log_history[:] = newest_entries(log_history)


def newest_losses(log_history: list[dict[str, Any]]) -> list[float]:
    """Give the held-out losses of the newest `NUM_ENTRIES` evaluations, oldest first: before a resume as after it."""
    return [entry["eval_loss"] for entry in log_history if "eval_loss" in entry][-NUM_ENTRIES:]


def schedule_state(scheduler: Any) -> dict[str, Any]:
    """Give what `restore_schedule` needs, as JSON values. Most schedules are functions of the step alone."""
    own = None
    if not isinstance(scheduler, LambdaLR):
        rates = [{k: group[k] for k in _SET_BY_SCHEDULES if k in group} for group in scheduler.optimizer.param_groups]
        own = {"scheduler": scheduler.state_dict(), "groups": rates}
    return {"schedule_steps": getattr(scheduler, "last_epoch", None), "schedule": own}


def restore_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Put schedule and rates back to where `schedule_state` found them; CheckpointError: it was of another kind."""
    steps, own = state["schedule_steps"], state.get("schedule")
    if (own is None) != isinstance(scheduler, LambdaLR):
        what = "the checkpoint is of a learning rate's schedule of another kind"
        hint = "the schedule that the run began with"
        raise CheckpointError(what, where="lr_scheduler_type", found=type(scheduler).__name__, hint=hint)
    if own is None:
        rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        scheduler.last_epoch = steps
        scheduler._last_lr = rates
        own = {"groups": [{"lr": rate} for rate in rates]}
    else:
        scheduler.load_state_dict(_typed_as(scheduler.state_dict(), own["scheduler"]))
    for group, saved in zip(scheduler.optimizer.param_groups, own["groups"], strict=True):
        group.update(_typed_as(group, saved))


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
