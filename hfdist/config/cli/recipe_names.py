"""The recipes that train, and the names of tasks that stand for one with its task. Imports nothing that is slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hfdist.config.task import TaskName
from hfdist.errors import ConfigError

RECIPES = ("pretrain", "finetune", "tune")
"""Those whose processes may be on several machines; each one's primary config has its name."""
NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{recipe: (recipe, ()) for recipe in RECIPES},
    "sft": ("finetune", ()),
    **{task.value: ("tune", (f"task={task.value}",)) for task in TaskName if task is not TaskName.causal_lm},
}
"""What people call a run -> the recipe, and the overrides that come first."""
RUN = "run"
"""Before a config file or the folder of a run: the file says the recipe (`own_config.py`)."""


def names_config(arguments: Iterable[str]) -> bool:
    """Whether flags name a primary config, which says its own task."""
    return any(argument.partition("=")[0] in ("--config", "--config-name") for argument in arguments)


def with_task(name: str, arguments: Sequence[str]) -> list[str]:
    """Put what a name stands for before the other arguments; ConfigError: they name a task, too."""
    _, overrides = NAMES[name]
    other = next((argument for argument in arguments if argument.startswith("task=")), None)
    if overrides and other is not None:
        what, found, where = "the task is given twice", f"{name}, and {other}", "task (command line)"
        hint = f"hfdist tune {other}, or hfdist {name} alone"
        raise ConfigError(what, where=where, found=found, hint=hint)
    return [*overrides, *arguments]
