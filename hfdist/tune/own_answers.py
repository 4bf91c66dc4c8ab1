"""The base of all objectives in which the model answers prompts and learns from the rewards of its answers."""

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
    """Has the prompts of a step answered and scored, and keeps the weights with which the model is compared."""

    evaluates_itself = True
    """Whether an evaluation is `evaluate`, not the loss of held-out rows."""

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__()
        self._task, self._rollouts = task, rollouts
        self._reference: ReferenceWeights | None = None
        """The weights with which the model is compared; None: there is no comparison."""

    def begin(self, training: Training) -> None:
        """Begin the rollouts, and keep the weights with which the model is compared. A collective."""
        super().begin(training)
        self._rollouts.begin(training)
        self._reference = ReferenceWeights(training.engine) if self._task.beta else None

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callbacks that write rollouts.jsonl, end the generators and move the reference."""
        callbacks: list[TrainerCallback] = [self._rollouts.lines]
        generators = self._rollouts.generators
        if generators is not None:
            callbacks += [generators.ledger, generators]
        return [*callbacks, *following(self._task, self._kept)]

    def _kept(self) -> ReferenceWeights:
        """Give the weights with which the model is compared; a config with `task.beta` has them."""
        assert self._reference is not None
        return self._reference

    def outer_state(self) -> OuterState | None:
        """Give the reference's weights for the checkpoint, if they follow the model."""
        return None if self._task.ref_model_sync_steps is None else self._reference

    def answer(self, batches: Sequence[Batch]) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their rewards. A collective."""
        answered, figures = self._rollouts.answer(batches, self._forwarding)
        # `_note` counts figures to the training by this mode. Where generators have answered, no forward has set it
        # since the last evaluation.
        self._training.model.train()
        self._note_answers(figures)
        return answered

    @contextmanager
    def _forwarding(self) -> Iterator[Forward]:
        """Make the context in which the model itself answers, with its weights whole."""
        with evaluating(self._training, are_training=True) as forward, self._training.engine.gathered():
            yield forward

    def evaluate(self, forward: Forward) -> list[float]:
        """Answer held-out prompts greedily, and give the negative reward of each answer as its loss. A collective."""
        figures = self._rollouts.answer_held_out(forward)
        self._note_answers(figures)
        # 0.0 - x and not -x: a reward of 0 gives no negative zero.
        return [0.0 - reward for reward in figures["reward"]]

    def _note_answers(self, figures: Mapping[str, Sequence[float]]) -> None:
        """Note the figures of answers, each of which is on one rank."""
        for name, values in figures.items():
            noted = torch.tensor(values, dtype=torch.float64)
            self._note(torch.ones(len(noted), dtype=torch.bool), {name: noted})
