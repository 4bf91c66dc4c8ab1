"""Distillation: a model learns the distribution that a teacher has over each next token (GKD, arXiv 2306.13649).

The loss is a divergence of the two distributions, a mean over the targets of the global batch. The targets are the
tokens of the rows, or in a share of the steps the tokens of the model's own answers. Logits of the model and of the
teacher exist for some rows at a time.
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
        teacher: says how likely each token is; a `KeptTeacher` has said it before the first step.
        answers: gives the model's own answers; None: the model learns from the rows as they are.
    """

    def __init__(self, task: TaskConfig, teacher: Teacher | KeptTeacher, answers: StudentAnswers | None = None) -> None:
        super().__init__()
        self._task, self._teacher, self._answers = task, teacher, answers
        self.names = () if answers is None else ("completion_tokens",)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the targets."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def begin(self, training: Training) -> None:
        """Begin the teacher, which may compute its likeliest tokens for all rows now. A collective."""
        super().begin(training)
        self._teacher.begin(training)
        if self._answers is not None:
            self._answers.begin(training)

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callback that writes rollouts.jsonl, if the model answers prompts."""
        return [] if self._answers is None else [self._answers.lines]

    def prepare(self, batch: Batch) -> Batch:
        """Add the teacher's likeliest tokens to a batch, if they were computed before the first step."""
        return self._teacher.prepare(batch)

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Put the model's own answers in place of the rows, in the steps that have them. A collective."""
        if self._answers is not None and self._answers.has(self._training.state.global_step):
            batches = self._answers.answer(batches)
            lengths = torch.cat([(batch["labels"] != IGNORED).sum(1) for batch in batches])
            self._note(lengths > 0, {"completion_tokens": lengths})
        return super().begin_step(batches, hooks)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the divergences from the teacher at the targets of a batch."""
        teacher, temperature = self._teacher.rows(batch), self._task.temperature
        return sum_from_teacher(self._training.head, model, batch, teacher, temperature=temperature)
