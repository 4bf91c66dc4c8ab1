"""Distillation: a model learns the distribution that a teacher has over each next token (GKD, arXiv 2306.13649).

The loss is the divergence at each target, `models/loss/divergence.py`, a mean over the targets of the global batch. The
targets are those of ordinary rows, or in a share of the steps the tokens of the model's own answers. Logits exist some
rows at a time, those of the teacher too.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import TrainerCallback

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.models.loss.distillation import sum_from_teacher
from hfdist.strategies.engine import Batch, TrainerHooks
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.training import Training
from hfdist.tune.kept_teacher import KeptTeacher
from hfdist.tune.student_answers import StudentAnswers
from hfdist.tune.teacher import Teacher


class Distillation(Objective):
    """The objective of distillation; its items are targets.

    Args:
        task: `task.*` of the run.
        teacher: says how likely each token is: now, or before the first step.
        answers: gives the model's own answers; None: the rows are learned from as they are.
    """

    def __init__(self, task: TaskConfig, teacher: Teacher | KeptTeacher, answers: StudentAnswers | None = None) -> None:
        super().__init__()
        self._task, self._teacher, self._answers = task, teacher, answers
        self.names = () if answers is None else ("completion_tokens",)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the targets."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def begin(self, training: Training) -> None:
        """Let the teacher compute what is kept of it."""
        super().begin(training)
        self._teacher.begin(training)
        if self._answers is not None:
            self._answers.begin(training)

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callback that writes rollouts.jsonl, if there are answers."""
        return [] if self._answers is None else [self._answers.lines]

    def prepare(self, batch: Batch) -> Batch:
        """Add what is kept of the teacher."""
        return self._teacher.prepare(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Let the model answer the prompts, in the steps that have its own answers."""
        if self._answers is not None and self._answers.has(self._training.state.global_step):
            batches = self._answers.answer(batches)
            lengths = torch.cat([(batch["labels"] != IGNORED).sum(1) for batch in batches])
            self._note(lengths > 0, {"completion_tokens": lengths})
        return super().begin_step(batches, hooks)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the divergences at the targets."""
        teacher, temperature = self._teacher.rows(batch), self._task.temperature
        return sum_from_teacher(self._training.head, model, batch, teacher, temperature=temperature)
