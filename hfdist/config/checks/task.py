"""Checks `task.*` against the rest of a config."""

from __future__ import annotations

from hfdist.config.data import Packing, RowFormat, TooLong, TrainOn
from hfdist.config.run import RunConfig
from hfdist.config.task import LOSSES, PreferenceLoss, TaskName
from hfdist.errors import ConfigError

_OF_TASKS = (RowFormat.preference, RowFormat.unpaired_preference, RowFormat.prompt)


def check_task(config: RunConfig) -> None:
    """Raise a ConfigError on what does not go with the task, or with a task at all."""
    _check_rows(config)
    task = config.task
    if task.name is TaskName.causal_lm:
        return
    _refuse(config)
    known = LOSSES[task.name]
    if task.loss not in known:
        what, allowed = "this task has no such loss", ", ".join(loss.value for loss in known)
        found, hint = f"{task.loss.value}, with task.name={task.name.value}", f"task.loss={known[0].value}"
        raise ConfigError(what, where="task.loss", found=found, allowed=allowed, hint=hint)
    if task.label_smoothing and task.loss is not PreferenceLoss.robust:
        what, allowed = "only the robust loss of dpo smooths labels", "0"
        found = f"{task.label_smoothing:g}, with task.name={task.name.value} and task.loss={task.loss.value}"
        raise ConfigError(what, where="task.label_smoothing", found=found, allowed=allowed, hint="task.loss=robust")


def _check_rows(config: RunConfig) -> None:
    """Each task reads rows of its own format; a task of next tokens reads the others."""
    wanted = config.task.name.row_format
    formats = {"data.format": config.data.format}
    for section in ("sources", "eval_sources"):
        for name, source in getattr(config.data, section).items():
            formats[f"data.{section}.{name}.format"] = source.format or config.data.format
    for key, found in formats.items():
        if wanted is None and found in _OF_TASKS:
            what, allowed = "rows of this format are for other tasks", "another format"
            hint = "hfdist tune, or data.format=auto"
        elif wanted is not None and found is not wanted:
            what, allowed, hint = "the task needs rows of its own format", wanted.value, f"{key}={wanted.value}"
        else:
            continue
        raise ConfigError(
            what, where=key, found=f"{found.value}, with task.name={config.task.name.value}", allowed=allowed, hint=hint
        )


def _refuse(config: RunConfig) -> None:
    task, data = config.task, config.data
    is_reward = task.name is TaskName.reward
    evaluate, report = config.evaluate, config.report
    asks = evaluate.prompts or evaluate.metrics or evaluate.lm_eval or report.sample_prompt
    for key, found, is_wrong, allowed, why in (
        (
            "data.packing",
            data.packing.value,
            data.packing is not Packing.best_fit,
            "best_fit",
            "answers must stay whole",
        ),
        ("data.too_long", data.too_long.value, data.too_long is not TooLong.drop, "drop", "answers must stay whole"),
        (
            "data.chat.train_on",
            data.chat.train_on.value,
            data.chat.train_on is TrainOn.all,
            "assistant",
            "prompts are no answers",
        ),
        (
            "strategy.context",
            config.strategy.context,
            config.strategy.context > 1,
            "1",
            "each rank would see a part of an answer",
        ),
        (
            "islands.method",
            config.islands.method.value,
            config.islands.is_used,
            "none",
            "islands train next tokens only in this version",
        ),
        (
            "evaluate.prompts, evaluate.metrics, evaluate.lm_eval, report.sample_prompt",
            "set",
            is_reward and bool(asks),
            "none",
            "a reward model writes no text",
        ),
        (
            "adapter.modules_to_save",
            str(config.adapter.modules_to_save),
            is_reward and config.adapter.is_used and "score" not in config.adapter.modules_to_save,
            "[score]",
            "the layer that scores is new, and must be trained",
        ),
        (
            "adapter.merge",
            "true",
            is_reward and config.adapter.is_used and config.adapter.merge,
            "false",
            "a reward model is not merged in this version",
        ),
    ):
        if is_wrong:
            hint = f"{key}={allowed}" if "," not in key else None
            found = f"{found}, with task.name={task.name.value}"
            raise ConfigError(
                f"it does not go with this task: {why}", where=key, found=found, allowed=allowed, hint=hint
            )
