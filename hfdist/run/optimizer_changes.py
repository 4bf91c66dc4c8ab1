"""The callback that sets the values of `optimizer.changes` after some steps, as a run with other overrides has them."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.config.optimizer import CHANGEABLE, OptimizerConfig
from hfdist.errors import ConfigError
from hfdist.optim.joined import Group
from hfdist.optim.rates import set_rate
from hfdist.optim.registry import settings_from_keys

_SETTINGS = {"lr": "lr", "weight_decay": "weight_decay", "beta1": "betas", "beta2": "betas", "eps": "eps"}
"""The setting of a group of parameters that each key of the config changes."""
_OF_ADAM = frozenset({"betas", "eps"})
"""Settings of Adam and its relatives."""


def check_changes(config: OptimizerConfig) -> None:
    """Raise a ConfigError on a change of a key that this optimizer has no setting for."""
    settings = settings_from_keys(config)
    for key in _changed_keys(config):
        if _SETTINGS[key] not in settings:
            what, found = "this optimizer has no such value", f"{key}, with {config.plugin or config.name.value}"
            raise ConfigError(what, where="optimizer.changes", found=found)


def _changed_keys(config: OptimizerConfig) -> list[str]:
    """List the keys that some change sets."""
    return [key for key in CHANGEABLE if any(getattr(change, key) is not None for change in config.changes)]


class OptimizerChanges(TrainerCallback):
    """Sets the values that hold for each step. All schedules of a config are torch's LambdaLR.

    Args:
        config: the config that the optimizer has just been made of; see `check_changes`.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config, self._keys = config, _changed_keys(config)
        self._of_adam = settings_from_keys(config) & _OF_ADAM
        self._scheduler: LambdaLR | None = None
        self._first_groups: list[Group] = []
        """The settings of each group of parameters as it was made."""
        self._first_rates: list[float] = []
        """The peak rate of each group as it was made."""

    def on_train_begin(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings as they were made: a resume brings no others."""
        assert lr_scheduler is not None, "the Trainer has made it"
        self._scheduler = lr_scheduler
        groups = lr_scheduler.optimizer.param_groups
        self._first_groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self._first_rates = [float(rate) for rate in lr_scheduler.base_lrs]

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Set what holds for this step, each time: a step that is skipped, or a rollback, sets the rates back."""
        assert self._scheduler is not None
        values = self._values_at(state.global_step)
        if "lr" in values:
            self._set_rates(self._scheduler, values["lr"])
        for group, first in zip(self._scheduler.optimizer.param_groups, self._first_groups, strict=True):
            if "weight_decay" in values:
                ratio = first["weight_decay"] / self._config.weight_decay
                group["weight_decay"] = values["weight_decay"] * ratio
            # A group that lacks one of them is of Muon, whose `eps` is another number.
            if self._of_adam <= group.keys():
                _set_adam(group, first, values)

    def _values_at(self, step: int) -> dict[str, float]:
        """Give the value of each changed key after so many steps."""
        values: dict[str, float] = {key: getattr(self._config, key) for key in self._keys}
        for change in self._config.changes:
            if change.step <= step:
                given = {key: getattr(change, key) for key in self._keys}
                values |= {key: value for key, value in given.items() if value is not None}
        return values

    def _set_rates(self, scheduler: LambdaLR, peak: float) -> None:
        """Set the learning rate of each group by a new peak rate; a group may have a multiple of the peak."""
        assert self._config.lr is not None, "a complete config has a rate"
        groups = scheduler.optimizer.param_groups
        for number, (group, first_rate) in enumerate(zip(groups, self._first_rates, strict=True)):
            # The ratio first: a multiple that is a power of two changes no bit of the peak's mantissa.
            base_rate = peak * (first_rate / self._config.lr)
            scheduler.base_lrs[number] = base_rate
            set_rate(group, base_rate * scheduler.lr_lambdas[number](scheduler.last_epoch))
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _set_adam(group: Group, first: Group, values: dict[str, float]) -> None:
    """Set the betas and `eps` of a group to the changed values; AdEMAMix has a third beta, which stays."""
    if "beta1" in values or "beta2" in values:
        beta1, beta2, *others = first["betas"]
        group["betas"] = (values.get("beta1", beta1), values.get("beta2", beta2), *others)
    if "eps" in values:
        group["eps"] = values["eps"]
