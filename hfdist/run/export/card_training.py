"""The part of a model card that tells the training: the method in a paragraph, and the figures in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hfdist.config.task import TaskConfig, TaskName
from hfdist.trainer.evaluation.loop import perplexity


class _Column(NamedTuple):
    """A column of the table of figures."""

    title: str
    keys: tuple[str, ...]
    """Keys of the figure: a line has one of them, or none."""
    form: str
    """Format of the value."""

    def find(self, figures: Mapping[str, object]) -> object:
        """Give the figure of this column; None: there is none."""
        return next((figures[key] for key in self.keys if figures.get(key) is not None), None)

    def cell(self, figures: Mapping[str, object]) -> str:
        """Give the text of a cell; empty: there is no figure."""
        value = self.find(figures)
        return "" if value is None else self.form.format(value)


_COLUMNS = (
    _Column("accuracy", ("rewards/accuracies", "accuracies", "accuracy"), "{:.1%}"),
    _Column("margin", ("rewards/margins", "margins"), "{:.4f}"),
    _Column("recall@1", ("recall_at_1",), "{:.1%}"),
    _Column("MRR", ("mrr",), "{:.4f}"),
    _Column("rank correlation", ("spearman",), "{:.4f}"),
    _Column("F1", ("f1",), "{:.4f}"),
    _Column("reward", ("reward",), "{:.4f}"),
    _Column("tokens of an answer", ("completion_tokens",), "{:.1f}"),
)


class _Row(NamedTuple):
    """A row of the table of figures."""

    title: str
    figures: dict[str, Any]
    """Figures by key, without the prefix of held-out data."""


def describe_task(task: TaskConfig) -> str:
    """Say in one paragraph how the model was trained; empty: by the loss of next tokens."""
    name = task.name
    if not name.traits.method:
        return ""
    sentences = [f"Trained {name.traits.method}."]
    if "beta" in name.traits.keys and not name.traits.is_reinforcement:
        margin = f", margin {task.margin:g}" if task.margin else ""
        stays = task.ref_model_sync_steps is None and name.traits.has_reference
        reference = "; the reference is the model that it began as" if stays else ""
        sentences.append(f"Loss `{task.loss.value}`, beta {task.beta:g}{margin}{reference}.")
    if name is TaskName.embed:
        similarity = "cosine" if task.normalize else "product"
        sizes = f" of the first {', '.join(map(str, task.matryoshka))} dimensions" if task.matryoshka else ""
        sentences.append(f"Loss `{task.loss.value}`{sizes}, similarity {similarity}, pooling {task.pooling.value}.")
    if task.ref_model_sync_steps is not None:
        moves = f"every {task.ref_model_sync_steps:,} steps, by the share {task.ref_model_mixup_alpha:g}"
        sentences.append(f"The reference moves towards the model {moves} (TR-DPO, arXiv 2404.09656).")
    if task.nll_weight:
        sentences.append(f"The loss of next tokens of the chosen answers is added with weight {task.nll_weight:g}.")
    if task.label_smoothing:
        sentences.append(f"Label smoothing {task.label_smoothing:g}.")
    if "desirable_weight" in name.traits.keys:
        weights = f"{task.desirable_weight:g}, and {task.undesirable_weight:g} of the others"
        sentences.append(f"The weight of liked answers is {weights}.")
    if name.traits.has_teacher:
        what = f"divergence beta {task.divergence_beta:g}, temperature {task.temperature:g}"
        what += "" if task.teacher_top_k is None else f"; its {task.teacher_top_k:,} likeliest tokens and a tail"
        sentences.append(f"Teacher: `{task.teacher}`; {what}.")
        if task.on_policy:
            sentences.append(f"In {task.on_policy:.0%} of the steps it learned from answers of its own.")
    if name.traits.is_reinforcement:
        rewards = ", ".join(f"`{reward}` with weight {weight:g}" for reward, weight in task.rewards.items())
        beta = f", beta {task.beta:g}" if task.beta else ""
        sentences.append(f"Loss `{task.loss.value}`{beta}. Rewards: {rewards}.")
        sampled = f"{task.num_generations} answers to each prompt, of at most {task.max_new_tokens:,} tokens"
        sentences.append(f"{sampled}, at temperature {task.temperature:g}.")
        if task.trained_prompts is not None:
            sentences.append(
                f"Of the prompts of a step, {task.trained_prompts:,} train: first those whose rewards differ."
            )
    return " ".join(sentences)


def describe_progress(lines: Sequence[Mapping[str, object]], task: TaskName) -> str:
    """Give a table of the first and the last lines of metrics.jsonl, training and held out."""
    rows = [*_first_and_last("training", "", lines), *_first_and_last("held out", "eval_", lines)]
    if not rows:
        return "None was logged."
    if task.traits.is_of_next_tokens:
        titles = ["nats per token", "perplexity"]
        cells = [[f"{row.figures['loss']:.4f}", f"{perplexity(row.figures['loss']):.1f}"] for row in rows]
    else:
        columns = [column for column in _COLUMNS if any(column.find(row.figures) is not None for row in rows)]
        titles = [column.title for column in columns]
        cells = [[column.cell(row.figures) for column in columns] for row in rows]
        if not task.traits.is_reinforcement:
            titles = [f"loss ({task.traits.loss_unit})", *titles]
            cells = [[f"{row.figures['loss']:.4f}", *texts] for row, texts in zip(rows, cells, strict=True)]
    head = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    return "\n".join(
        [*head, *(f"| {row.title} | {' | '.join(texts)} |" for row, texts in zip(rows, cells, strict=True))]
    )


def _first_and_last(kind: str, prefix: str, lines: Sequence[Mapping[str, object]]) -> list[_Row]:
    """Give the first and the last of the lines with a loss under this prefix; one alone: that one; none: none."""
    with_loss = [line for line in lines if line.get(f"{prefix}loss") is not None]
    chosen = with_loss if len(with_loss) < 2 else [with_loss[0], with_loss[-1]]
    rows = []
    for line in chosen:
        figures = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
        rows.append(_Row(f"{kind}, step {line['step']:,}", figures))
    return rows
