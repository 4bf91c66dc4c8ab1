"""The recipes that train, and the names of tasks that stand for one with its task. Imports nothing that is slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hfdist.config.task import PRESETS, TaskName
from hfdist.errors import ConfigError

RECIPES = ("pretrain", "finetune", "tune")
"""Recipes that train, on several machines if asked; each one's primary config has its name."""
SHARED = ("index", "pretokenize")
"""Recipes whose files several processes may share, each with a `data.shard`; they have the primary config of the first
of RECIPES."""
TUNED = (*(task.value for task in TaskName if task is not TaskName.causal_lm), *PRESETS)
"""Options of the group `task` but that of next tokens."""
NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{recipe: (recipe, ()) for recipe in RECIPES},
    "sft": ("finetune", ()),
    **{task: ("tune", (f"task={task}",)) for task in TUNED},
}
"""What people call a run -> the recipe, and the overrides that come first."""
_TASK = "task (command line)"
_STARTED = "hfdist {name} launch.processes=2 starts its processes itself"
_WRITTEN = "a run writes its model at its end, into model/ of its folder, as from_pretrained reads it"
_USED = "the last lines of a run say how its model is used"
_EVALUATED = "a run evaluates as it trains: train.eval_every=100, evaluate.lm_eval=[hellaswag]"
HINTS: Mapping[str, str] = {
    "train": "hfdist pretrain, or hfdist finetune for a model that is trained already",
    **dict.fromkeys(("launch", "start", "torchrun", "accelerate", "deepspeed"), _STARTED),
    **dict.fromkeys(("export", "convert", "merge"), _WRITTEN),
    **dict.fromkeys(("chat", "generate", "infer", "inference"), _USED),
    **dict.fromkeys(("eval", "evaluate"), _EVALUATED),
    "resume": "the same command line again goes on; hfdist run runs/NAME does it from the run's folder",
    **dict.fromkeys(("tokenize", "preprocess"), "hfdist pretokenize"),
    **dict.fromkeys(
        ("upload", "push"), "export.push_to=OWNER/NAME uploads at the end; later, `hf upload OWNER/NAME RUN/model`"
    ),
    **dict.fromkeys(("compare", "diff"), "hfdist report RUN OTHER_RUN"),
    **{loss.value: f"hfdist grpo task.loss={loss.value}" for loss in TaskName.grpo.traits.losses[1:]},
    "gkd": "hfdist distill learns from a teacher",
    "config": "hfdist pretrain --cfg job prints a config",
}
"""Commands of other programs, and what does it here; `{name}`: the recipe that is named after it, or the first one."""
RUN = "run"
"""Before a config file or the folder of a run: the file says the recipe (`own_config.py`)."""


def names_config(arguments: Iterable[str]) -> bool:
    """Whether flags name a primary config, which says its own task."""
    return any(argument.partition("=")[0] in ("--config", "--config-name") for argument in arguments)


def with_task(name: str, arguments: Sequence[str]) -> list[str]:
    """Put what a name stands for before the other arguments; ConfigError: they name a task, too."""
    _, overrides = NAMES[name]
    other = next((argument for argument in arguments if argument.startswith("task=")), None)
    task = None if other is None else other.partition("=")[2]
    if name in ("sft", "finetune") and task in TUNED:
        what, where, hint = f"there is no such task of {name}, which learns next tokens", _TASK, f"hfdist {task}"
        raise ConfigError(what, where=where, found=f"{name}, and {other}", hint=hint)
    if overrides and other is not None:
        what, found, where = "the task is given twice", f"{name}, and {other}", _TASK
        losses = [loss.value for loss in TaskName.__members__.get(name, TaskName.cpo).traits.losses]
        is_loss = task in losses and task not in TUNED
        hint = f"hfdist {name} task.loss={task}" if is_loss else f"hfdist tune {other}, or hfdist {name} alone"
        raise ConfigError(what, where=where, found=found, hint=hint)
    return [*overrides, *arguments]
