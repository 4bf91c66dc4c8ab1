"""What all objectives share in which the model answers prompts and learns from rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.training import Training
from hfdist.tune.reference_weights import ReferenceWeights
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
        """Give the callbacks that write rollouts.jsonl and end the generators."""
        generators = self._rollouts.generators
        return [self._rollouts.lines] if generators is None else [self._rollouts.lines, generators.ledger, generators]

    def answer(self, batches: Sequence[Batch]) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their rewards. A collective."""
        answered, figures = self._rollouts.answer(batches, self._forwarding)
        self._training.model.train()
        self._note_answers(figures)
        return answered

    @contextmanager
    def _forwarding(self) -> Iterator[Forward]:
        with evaluating(self._training, are_training=True) as forward, self._training.engine.gathered():
            yield forward

    def share(
        self, batch: Batch, forward: Forward, function: Callable[[nn.Module, Batch], torch.Tensor]
    ) -> torch.Tensor:
        """Give what a function of (model, part of a batch) says of each token of a batch, on the CPU. A collective.

        Returns:
            Values of shape [rows, tokens], the same on all ranks of a model replica.
        """
        values: list[torch.Tensor] = []

        def note(model: nn.Module, part: Batch) -> torch.Tensor:
            values.append(function(model, part))
            return values[-1]

        forward(batch, note)
        known = torch.full(batch["labels"].shape, -torch.inf, device=self._training.args.device)
        if values:
            known = torch.cat(values)[: len(known)]
        strategy = self._training.strategy
        for axis in ("pipeline", "tensor"):
            if getattr(strategy.topology, axis) > 1:
                # All ranks of a model replica must have the same batch, and only a last stage has logits.
                dist.all_reduce(known, op=dist.ReduceOp.MAX, group=strategy.mesh.get_group(axis))
        return known.cpu()

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
