"""Reads and writes the labels in a model's config: their names, their number, and the kind of problem."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hfdist.config.data import LabelsConfig, ProblemType


def own_labels(architecture: PreTrainedConfig) -> list[str]:
    """Give the names of the labels in a model's config, in the order of their numbers."""
    named = architecture.id2label or {}
    return [name for _, name in sorted((int(number), name) for number, name in named.items())]


def set_labels(architecture: PreTrainedConfig, labels: LabelsConfig) -> None:
    """Set the labels in a model's config, in place: its head then gives a number for each label, or one number.

    Args:
        architecture: the model's config, as `find_architecture` gives it; it is changed.
        labels: the labels of the training rows; without names the model gives one number.
    """
    if not labels.names or labels.problem_type is ProblemType.regression:
        architecture.num_labels = 1
    else:
        architecture.id2label = dict(enumerate(labels.names))
        architecture.label2id = {name: number for number, name in enumerate(labels.names)}
    is_told = labels.problem_type is not ProblemType.auto
    setattr(architecture, "problem_type", labels.problem_type.value if is_told else None)  # noqa: B010
