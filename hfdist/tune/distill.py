"""Distillation: a model learns the distribution that a teacher has over each next token (GKD, arXiv 2306.13649).

The loss is the divergence at each target of ordinary rows, `models/loss/divergence.py`, a mean over the targets of the
global batch. Logits exist some rows at a time, those of the teacher too.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.models.loss.lazy_logits import sum_divergences
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.objective import Objective, token_logits
from hfdist.tune.teacher import Teacher


class Distillation(Objective):
    """Off-policy distillation. An item is a target."""

    def __init__(self, task: TaskConfig, teacher: Teacher) -> None:
        super().__init__()
        self._task, self._teacher = task, teacher

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the targets."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the divergences at the targets."""
        head, temperature = self._training.head, self._task.temperature
        with nullcontext() if head is None else head.deferring(model):
            student = token_logits(model, batch, temperature=temperature)
            # Second: in a pipeline, the model ends the call on each stage but the last, and these need no teacher.
            with self._teacher.logits(batch, temperature=temperature) as teacher:
                beta, targets = self._task.divergence_beta, batch["labels"][:, 1:]
                return sum_divergences(student, teacher, targets, beta=beta, ignore_index=IGNORED)
