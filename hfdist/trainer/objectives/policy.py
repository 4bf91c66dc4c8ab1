"""Reinforcement learning from rewards: GRPO (arXiv 2402.03300) and RLOO (arXiv 2402.14740).

    prompts [p]  ->  G answers each, sampled (rollout.py)  ->  rewards  ->  advantages within each prompt's group
    loss of an answer's tokens  -min(ratio x A, clip(ratio) x A),  ratio: new over old probability

GRPO sums over tokens and divides by all answers' tokens of the global batch (as DAPO, arXiv 2503.14476, and TRL do);
RLOO takes the ratio of whole answers, and divides by their number. An answer trains once. Within the step, the model
that it trains gave it: so the old probabilities are those that the step begins with. Generators may be some steps
behind: they give the old probabilities, and a ratio above 3 counts as 3 (dual clip, arXiv 1912.09729; TRL truncates
importance weights alike).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskName
from hfdist.models.loss.lazy_logits import reduce_token_losses
from hfdist.strategies.base import Batch, Forward, TrainerHooks
from hfdist.trainer.evaluation.loop import Evaluator
from hfdist.trainer.objectives.base import Objective
from hfdist.trainer.objectives.rollout import ADVANTAGES, OLD_LOG_PROBABILITIES, Rollouts

_SMALLEST = 1e-4
"""Added to a standard deviation, as TRL does."""
_LARGEST_RATIO = 3.0
"""Without it, a bad answer that has become likely would outweigh all others."""


class PolicyGradient(Objective):
    """GRPO and RLOO. An item is a token of an answer, or an answer."""

    evaluates_itself = True

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__()
        self._task, self._rollouts = task, rollouts
        self._is_of_tokens = task.name is TaskName.grpo
        self.names = ("entropy", "clipped_ratios", *rollouts.names)

    def begin(self, trainer: Any) -> None:
        """See what the model allows."""
        super().begin(trainer)
        self._rollouts.begin(trainer)

    def callbacks(self) -> list[TrainerCallback]:
        """Give what writes rollouts.jsonl, and what ends the generators."""
        generators = self._rollouts.generators
        return [self._rollouts.lines] if generators is None else [self._rollouts.lines, generators.ledger, generators]

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Add those of the generators."""
        generators = self._rollouts.generators if trains else None
        return super().figures(trains=trains) | ({} if generators is None else generators.figures())

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the tokens of answers, or the answers."""
        is_target = batch["labels"] != IGNORED
        return is_target.sum() if self._is_of_tokens else is_target.any(1).sum()

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their advantages."""
        answered, figures = self._rollouts.answer(batches, self._forwarding, self.advantages)
        self._trainer.model.train()
        self._note_answers(figures)
        return answered

    @contextmanager
    def _forwarding(self) -> Iterator[Forward]:
        with Evaluator(self._trainer).forwards() as forward, self._trainer.engine.gathered():
            yield forward

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Compare the rewards of each prompt's answers; both of shape [prompts, answers]."""
        if self._is_of_tokens:
            centered = rewards - rewards.mean(1, keepdim=True)
            return centered / (rewards.std(1, keepdim=True) + _SMALLEST) if self._task.scale_rewards else centered
        num_others = rewards.shape[1] - 1
        return rewards - (rewards.sum(1, keepdim=True) - rewards) / num_others

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the items."""
        rows, tokens = batch["labels"].shape
        advantages, clip = batch[ADVANTAGES][:, None], self._task.clip

        def reduce(losses: torch.Tensor) -> torch.Tensor:
            log_probabilities = -losses.view(rows, tokens - 1)
            old = log_probabilities.detach()
            if OLD_LOG_PROBABILITIES in batch:
                old = batch[OLD_LOG_PROBABILITIES][:, 1:]
            is_target = batch["labels"][:, 1:] != IGNORED
            if not self._is_of_tokens:
                self._note(is_target, {"entropy": -log_probabilities})
                log_probabilities = log_probabilities.sum(1, keepdim=True)
                old = old.sum(1, keepdim=True)
                is_target = is_target.any(1, keepdim=True)
            else:
                self._note(is_target, {"entropy": -log_probabilities})
            losses, is_clipped = clipped_losses(log_probabilities, old, advantages, clip)
            self._note(is_target, {"clipped_ratios": is_clipped.float()})
            return torch.where(is_target, losses, 0).sum()

        outputs: Any = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        logits = outputs.logits[:, :-1]
        if self._task.temperature != 1.0:
            logits = logits / self._task.temperature
        return reduce_token_losses(logits, batch["labels"][:, 1:], reduce, ignore_index=IGNORED)

    def evaluate(self, forward: Forward) -> float:
        """Answer held-out prompts greedily, and give the mean reward, negative."""
        figures = self._rollouts.answer_held_out(forward)
        self._note_answers(figures)
        rewards = figures["reward"]
        return -sum(rewards) / max(len(rewards), 1)

    def _note_answers(self, figures: Mapping[str, Sequence[float]]) -> None:
        """Each answer's figures are given on one rank."""
        for name, values in figures.items():
            own = torch.tensor(values, dtype=torch.float64)
            self._note(torch.ones(len(own), dtype=torch.bool), {name: own})


def clipped_losses(
    log_probabilities: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the losses of tokens or answers, and whether their ratio counts no more; all of one shape.

    Args:
        log_probabilities: of the policy that is trained.
        old: of the policy that drew them.
        advantages: of them.
        clip: how far the ratio may move a loss.
    """
    ratio = (log_probabilities - old).exp().clamp(max=_LARGEST_RATIO)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages
