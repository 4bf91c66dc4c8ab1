"""What all objectives share in which the model answers prompts and learns from rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import TrainerCallback

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.checkpointing.save_options import OuterState
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.training import Training
from hfdist.tune.reference_weights import ReferenceWeights, following
from hfdist.tune.rollout import Rollouts


class OwnAnswers(Objective):
    """Answers of a step and their rewards, and the weights that the model is compared with."""

    evaluates_itself = True

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__()
        self._task, self._rollouts = task, rollouts
        self._reference: ReferenceWeights | None = None
        """The weights to compare with; None: there is no comparison."""

    def begin(self, training: Training) -> None:
        """Begin the rollouts, and keep the weights that the model is compared with."""
        super().begin(training)
        self._rollouts.begin(training)
        self._reference = ReferenceWeights(training.engine) if self._task.beta else None

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callbacks that write rollouts.jsonl, end the generators and move the reference."""
        generators = self._rollouts.generators
        own = [self._rollouts.lines] if generators is None else [self._rollouts.lines, generators.ledger, generators]
        return [*own, *following(self._task, self._kept)]

    def _kept(self) -> ReferenceWeights:
        assert self._reference is not None  # the config has a beta
        return self._reference

    def outer_state(self) -> OuterState | None:
        """Give the reference, if it follows the model."""
        return None if self._task.ref_model_sync_steps is None else self._reference

    def answer(self, batches: Sequence[Batch]) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their rewards. A collective."""
        answered, figures = self._rollouts.answer(batches, self._forwarding)
        # Also where generators have answered, and the last evaluation has left it otherwise: figures go by it.
        self._training.model.train()
        self._note_answers(figures)
        return answered

    @contextmanager
    def _forwarding(self) -> Iterator[Forward]:
        with evaluating(self._training, are_training=True) as forward, self._training.engine.gathered():
            yield forward

    def evaluate(self, forward: Forward) -> list[float]:
        """Answer held-out prompts greedily, and give the rewards, negative."""
        figures = self._rollouts.answer_held_out(forward)
        self._note_answers(figures)
        # A reward of 0 is no negative zero.
        return [0.0 - reward for reward in figures["reward"]]

    def _note_answers(self, figures: Mapping[str, Sequence[float]]) -> None:
        """Note the figures of answers, each of which is on one rank."""
        for name, values in figures.items():
            own = torch.tensor(values, dtype=torch.float64)
            self._note(torch.ones(len(own), dtype=torch.bool), {name: own})
