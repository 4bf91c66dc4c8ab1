"""What a model card says of the task: how the model was trained, and how far it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hfdist.config.task import PreferenceLoss, TaskConfig, TaskName
from hfdist.trainer.evaluation.loop import perplexity

_METHODS = {
    TaskName.dpo: "by direct preference optimization (DPO, arXiv 2305.18290) on pairs of answers",
    TaskName.kto: "by Kahneman-Tversky optimization (KTO, arXiv 2402.01306) on answers that were liked or not",
    TaskName.reward: "on pairs of answers: the chosen one of a pair is to have the higher score",
    TaskName.grpo: "by group relative policy optimization (GRPO, arXiv 2402.03300): its own answers, by their rewards",
    TaskName.rloo: "by REINFORCE leave-one-out (RLOO, arXiv 2402.14740): its own answers, by their rewards",
}
_FIGURES = (
    ("accuracy", ("rewards/accuracies", "accuracies"), "{:.1%}"),
    ("margin", ("rewards/margins", "margins"), "{:.4f}"),
    ("reward", ("reward",), "{:.4f}"),
    ("tokens of an answer", ("completion_tokens",), "{:.1f}"),
)
"""Columns of the table: a name, keys of which a line has one, and how it is written."""


def describe_task(task: TaskConfig) -> str:
    """Say in one paragraph how the model was trained; nothing of next tokens."""
    name = task.name
    if name not in _METHODS:
        return ""
    words = [f"Trained {_METHODS[name]}."]
    if name.has_reference:
        words.append(f"Loss `{task.loss.value}`, beta {task.beta:g}; the reference is the model that it began as.")
    if task.loss is PreferenceLoss.robust:
        words.append(f"Label smoothing {task.label_smoothing:g}.")
    if name is TaskName.kto:
        weights = f"{task.desirable_weight:g}, and {task.undesirable_weight:g} of the others"
        words.append(f"The weight of liked answers is {weights}.")
    if name.is_reinforcement:
        rewards = ", ".join(f"`{own}` with weight {weight:g}" for own, weight in task.rewards.items())
        words.append(f"Rewards: {rewards}.")
        sampled = f"{task.num_generations} answers to each prompt, of at most {task.max_new_tokens:,} tokens"
        words.append(f"{sampled}, at temperature {task.temperature:g}.")
    return " ".join(words)


def describe_progress(lines: Sequence[Mapping[str, object]], task: TaskName) -> str:
    """Give a table of the first and the last lines of metrics.jsonl, training and held out."""
    found = [
        (f"{kind}, step {line['step']:,}", _without(prefix, line))
        for kind, prefix in (("training", ""), ("held out", "eval_"))
        for line in _ends([line for line in lines if line.get(f"{prefix}loss") is not None])
    ]
    if not found:
        return "None was logged."
    if task is TaskName.causal_lm:
        titles = ["nats per token", "perplexity"]
        cells = [[f"{f['loss']:.4f}", f"{perplexity(f['loss']):.1f}"] for _, f in found]
    else:
        columns = [column for column in _FIGURES if any(key in f for _, f in found for key in column[1])]
        titles = [name for name, _, _ in columns]
        cells = [[_cell(figures, keys, form) for _, keys, form in columns] for _, figures in found]
        if not task.is_reinforcement:
            titles = [f"loss ({task.loss_unit})", *titles]
            cells = [[f"{f['loss']:.4f}", *own] for (_, f), own in zip(found, cells, strict=True)]
    rows = [f"| {what} | {' | '.join(own)} |" for (what, _), own in zip(found, cells, strict=True)]
    return "\n".join([f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|", *rows])


def _ends(lines: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    return lines[:1] + lines[1:][-1:]


def _without(prefix: str, line: Mapping[str, object]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def _cell(figures: Mapping[str, object], keys: Sequence[str], form: str) -> str:
    value = next((figures[key] for key in keys if figures.get(key) is not None), None)
    return "" if value is None else form.format(value)
