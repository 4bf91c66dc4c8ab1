"""The errors of values that do not go together, or not with the task; and how a value is written in them."""

from __future__ import annotations

from functools import reduce

from hfdist.config.plain_values import override_value, plain
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError


def conflict(
    config: RunConfig, keys: str, what: str, *, allowed: str | None = None, hint: str | None = None
) -> ConfigError:
    """Give an error about the first of `keys`; the values of the other keys are the reason."""
    key, *others = keys.split()
    found = shown(config, key)
    if others:
        found += ", with " + " and ".join(f"{other}={shown(config, other)}" for other in others)
    return ConfigError(what, where=key, found=found, allowed=allowed, hint=hint)


def misfit(config: RunConfig, key: str, allowed: str, why: str) -> ConfigError:
    """Give the error of a value that does not go with the task, where only the value `allowed` does."""
    found = override_value(plain(reduce(getattr, key.split("."), config)))
    task = f"task.name={config.task.name.value}"
    return ConfigError(why, where=key, found=f"{found}, with {task}", allowed=allowed, hint=f"{key}={allowed}")


def shown(config: RunConfig, key: str) -> str:
    """Give a value as it is written in an override."""
    value = plain(reduce(getattr, key.split("."), config))
    if isinstance(value, (list, dict)):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else override_value(value)
