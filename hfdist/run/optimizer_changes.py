"""`optimizer.changes`: other values after some steps, as in a run that goes on with other overrides."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.config.optimizer import CHANGEABLE, OptimizerConfig
from hfdist.errors import ConfigError
from hfdist.optim.joined import Group

# A scheduler is Any here: DeepSpeed's is of another class than torch's.


class OptimizerChanges(TrainerCallback):
    """Sets the values that hold after each step. All schedules of a config are torch's LambdaLR.

    Args:
        config: the config that the optimizer has just been made of.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._keys = [key for key in CHANGEABLE if any(getattr(one, key) is not None for one in config.changes)]
        self._scheduler: Any = None
        self._begun: list[Group] = []
        """Each group of parameters as it was made, with `base_lr`."""

    def on_train_begin(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: Any = None,
        **kwargs: object,
    ) -> None:
        """Keep the groups as they were made, after a resume; ConfigError: the optimizer lacks a value that changes."""
        self._scheduler = lr_scheduler
        groups = zip(lr_scheduler.optimizer.param_groups, lr_scheduler.base_lrs, strict=True)
        self._begun = [{**group, "params": None, "base_lr": base} for group, base in groups]
        names = {"lr": "lr", "weight_decay": "weight_decay", "beta1": "betas", "beta2": "betas", "eps": "eps"}
        for key in self._keys:
            if not any(names[key] in group for group in self._begun):
                what, found = "this optimizer has no such value", f"{key}, with {self._config.name.value}"
                raise ConfigError(what, where="optimizer.changes", found=found)

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Set what holds for this step, each time: a step that is skipped, or a rollback, sets the rates back."""
        self._apply(state.global_step)

    def _apply(self, step: int) -> None:
        scheduler, config = self._scheduler, self._config
        now = {key: getattr(config, key) for key in self._keys}
        for change in config.changes:
            if change.step <= step:
                now |= {key: value for key in self._keys if (value := getattr(change, key)) is not None}
        for index, (group, begun) in enumerate(zip(scheduler.optimizer.param_groups, self._begun, strict=True)):
            if "lr" in now:
                scheduler.base_lrs[index] = _scaled(begun["base_lr"], config.lr, now["lr"])
                group["lr"] = scheduler.base_lrs[index] * scheduler.lr_lambdas[index](scheduler.last_epoch)
            if "weight_decay" in now and "weight_decay" in group:
                group["weight_decay"] = _scaled(begun["weight_decay"], config.weight_decay, now["weight_decay"])
            if "betas" in group:
                first, second, *others = begun["betas"]
                group["betas"] = (now.get("beta1", first), now.get("beta2", second), *others)
            if "eps" in now and isinstance(begun.get("eps"), float):
                group["eps"] = now["eps"]
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _scaled(own: float, before: float | None, now: float) -> float:
    """Scale a group's own value as the config's changes; the own one may differ, such as 0 where nothing decays."""
    assert before is not None, "of a complete config"
    # In this order, so that a power of two stays one.
    return now * (own / before)
