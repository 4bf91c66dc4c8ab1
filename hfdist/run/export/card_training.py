"""How a model was trained, for its card: the method in a paragraph, and the figures in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hfdist.config.task import TaskConfig, TaskName
from hfdist.trainer.evaluation.loop import perplexity

_FIGURES = (
    ("accuracy", ("rewards/accuracies", "accuracies", "accuracy"), "{:.1%}"),
    ("margin", ("rewards/margins", "margins"), "{:.4f}"),
    ("recall@1", ("recall_at_1",), "{:.1%}"),
    ("MRR", ("mrr",), "{:.4f}"),
    ("rank correlation", ("spearman",), "{:.4f}"),
    ("F1", ("f1",), "{:.4f}"),
    ("reward", ("reward",), "{:.4f}"),
    ("tokens of an answer", ("completion_tokens",), "{:.1f}"),
)
"""Columns of the table: a name, keys of which a line has one, and how it is written."""


def describe_task(task: TaskConfig) -> str:
    """Say in one paragraph how the model was trained; nothing of next tokens."""
    name = task.name
    if not name.traits.method:
        return ""
    words = [f"Trained {name.traits.method}."]
    if "beta" in name.traits.keys and not name.traits.is_reinforcement:
        margin = f", margin {task.margin:g}" if task.margin else ""
        stays = task.ref_model_sync_steps is None and name.traits.has_reference
        reference = "; the reference is the model that it began as" if stays else ""
        words.append(f"Loss `{task.loss.value}`, beta {task.beta:g}{margin}{reference}.")
    if name is TaskName.embed:
        similarity = "cosine" if task.normalize else "product"
        sizes = f" of the first {', '.join(map(str, task.matryoshka))} dimensions" if task.matryoshka else ""
        words.append(f"Loss `{task.loss.value}`{sizes}, similarity {similarity}, pooling {task.pooling.value}.")
    if task.ref_model_sync_steps is not None:
        moves = f"every {task.ref_model_sync_steps:,} steps, by the share {task.ref_model_mixup_alpha:g}"
        words.append(f"The reference moves towards the model {moves} (TR-DPO, arXiv 2404.09656).")
    if task.nll_weight:
        words.append(f"The loss of next tokens of the chosen answers is added with weight {task.nll_weight:g}.")
    if task.label_smoothing:
        words.append(f"Label smoothing {task.label_smoothing:g}.")
    if "desirable_weight" in name.traits.keys:
        weights = f"{task.desirable_weight:g}, and {task.undesirable_weight:g} of the others"
        words.append(f"The weight of liked answers is {weights}.")
    if name.traits.has_teacher:
        what = f"divergence beta {task.divergence_beta:g}, temperature {task.temperature:g}"
        what += "" if task.teacher_top_k is None else f"; its {task.teacher_top_k:,} likeliest tokens and a tail"
        words.append(f"Teacher: `{task.teacher}`; {what}.")
        if task.on_policy:
            words.append(f"In {task.on_policy:.0%} of the steps it learned from answers of its own.")
    if name.traits.is_reinforcement:
        rewards = ", ".join(f"`{reward}` with weight {weight:g}" for reward, weight in task.rewards.items())
        beta = f", beta {task.beta:g}" if task.beta else ""
        words.append(f"Loss `{task.loss.value}`{beta}. Rewards: {rewards}.")
        sampled = f"{task.num_generations} answers to each prompt, of at most {task.max_new_tokens:,} tokens"
        words.append(f"{sampled}, at temperature {task.temperature:g}.")
        if task.trained_prompts is not None:
            words.append(f"Of the prompts of a step, {task.trained_prompts:,} train: first those whose rewards differ.")
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
    if task.traits.is_of_next_tokens:
        titles = ["nats per token", "perplexity"]
        cells = [[f"{f['loss']:.4f}", f"{perplexity(f['loss']):.1f}"] for _, f in found]
    else:
        columns = [column for column in _FIGURES if any(key in f for _, f in found for key in column[1])]
        titles = [name for name, _, _ in columns]
        cells = [[_cell(figures, keys, form) for _, keys, form in columns] for _, figures in found]
        if not task.traits.is_reinforcement:
            titles = [f"loss ({task.traits.loss_unit})", *titles]
            cells = [[f"{f['loss']:.4f}", *row] for (_, f), row in zip(found, cells, strict=True)]
    rows = [f"| {what} | {' | '.join(row)} |" for (what, _), row in zip(found, cells, strict=True)]
    return "\n".join([f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|", *rows])


def _ends(lines: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    return lines[:1] + lines[1:][-1:]


def _without(prefix: str, line: Mapping[str, object]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def _cell(figures: Mapping[str, object], keys: Sequence[str], form: str) -> str:
    value = next((figures[key] for key in keys if figures.get(key) is not None), None)
    return "" if value is None else form.format(value)
