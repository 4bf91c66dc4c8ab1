"""Reinforcement learning from rewards: GRPO (arXiv 2402.03300) and RLOO (arXiv 2402.14740).

    prompts [p]  ->  G answers each, sampled (rollout.py)  ->  rewards  ->  advantages within each prompt's group
    loss of an answer's tokens  -min(ratio x A, clip(ratio) x A),  ratio: new over old probability

GRPO sums over tokens and divides by all answers' tokens of the global batch (as DAPO, arXiv 2503.14476, and TRL do);
RLOO takes the ratio of whole answers, and divides by their number. An answer trains once. Within the step, the model
that it trains gave it: so the old probabilities are those that the step begins with. Generators may have a policy that
is some steps older: they give the old probabilities, and a ratio above 3 counts as 3 (dual clip, arXiv 1912.09729; TRL
truncates importance weights alike).

`task.beta` holds the model to the one that the run begins with; p and r are the probabilities of a token by the two.
GRPO adds beta x ratio x (r / p - log(r / p) - 1) to the loss of each token (with the ratio as in arXiv 2512.02556 and
TRL). RLOO takes beta x log(p / r), summed over an answer, off its reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskName
from hfdist.models.loss.lazy_logits import Reduce
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Objective, reduce_tokens
from hfdist.trainer.training import Training
from hfdist.tune.reference_weights import ReferenceWeights
from hfdist.tune.rollout import ADVANTAGES, OLD_LOG_PROBABILITIES, Rollouts

REFERENCE_LOG_PROBABILITIES = "reference_log_probabilities"
"""Key in a batch of GRPO: log-probabilities of answers' tokens by the reference, else 0; shape [rows, tokens]."""
DIVERGENCE = "divergence"
"""Key in a batch of RLOO: log(p / r) of each token of an answer, else 0; shape [rows, tokens]."""

_SMALLEST = 1e-4
"""Added to a standard deviation, as TRL does."""
_LARGEST_RATIO = 3.0
"""The largest ratio that counts: otherwise a bad answer that has become likely would outweigh all others."""


class PolicyGradient(Objective):
    """GRPO and RLOO. An item is a token of an answer, or an answer."""

    evaluates_itself = True

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__()
        self._task, self._rollouts = task, rollouts
        self._is_of_tokens = task.name is TaskName.grpo
        self._reference: ReferenceWeights | None = None
        """The weights to compare with; None: there is no comparison."""
        self.names = ("entropy", "clipped_ratios", *(["kl"] if task.beta else []), *rollouts.names)

    def begin(self, training: Training) -> None:
        """Begin the rollouts, and keep the weights that the model is compared with."""
        super().begin(training)
        self._rollouts.begin(training)
        self._reference = ReferenceWeights(training.engine) if self._task.beta else None

    def callbacks(self) -> list[TrainerCallback]:
        """Give the callbacks that write rollouts.jsonl and end the generators."""
        generators = self._rollouts.generators
        return [self._rollouts.lines] if generators is None else [self._rollouts.lines, generators.ledger, generators]

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Add the figures of the generators."""
        generators = self._rollouts.generators if trains else None
        return super().figures(trains=trains) | ({} if generators is None else generators.figures())

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the tokens of answers, or the answers."""
        is_target = batch["labels"] != IGNORED
        return is_target.sum() if self._is_of_tokens else is_target.any(1).sum()

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their advantages."""
        answered, rewards, figures = self._rollouts.answer(batches, self._forwarding)
        if self._reference is not None:
            with evaluating(self._training, are_training=True) as forward:
                answered = self._compare(answered, forward, self._reference)
        self._training.model.train()
        self._note_answers(figures)
        if self._reference is not None and not self._is_of_tokens:
            rewards = rewards - self._task.beta * self._sum_divergences(answered).view(rewards.shape)
        of_answers = self.advantages(rewards).flatten().split([len(batch["labels"]) for batch in answered])
        return [batch | {ADVANTAGES: own} for batch, own in zip(answered, of_answers, strict=True)]

    def _compare(self, batches: Sequence[Batch], forward: Forward, reference: ReferenceWeights) -> list[Batch]:
        """Add the reference's log-probabilities, or the divergence from them, to batches of answers. A collective."""
        with reference.in_place():
            compared = [
                batch | {REFERENCE_LOG_PROBABILITIES: self._log_probabilities(batch, forward)} for batch in batches
            ]
        if self._is_of_tokens:
            return compared
        return [
            batch | {DIVERGENCE: self._log_probabilities(batch, forward) - other[REFERENCE_LOG_PROBABILITIES]}
            for batch, other in zip(batches, compared, strict=True)
        ]

    def _sum_divergences(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Sum the divergence over the tokens of each answer; shape [answers]."""
        for batch in batches:
            self._note(batch["labels"] != IGNORED, {"kl": batch[DIVERGENCE]})
        return torch.cat([batch[DIVERGENCE].sum(1) for batch in batches])

    def _log_probabilities(self, batch: Batch, forward: Forward) -> torch.Tensor:
        """Give log-probabilities of answers' tokens, 0 elsewhere, on the CPU; shape [rows, tokens]. A collective."""
        rows, tokens = batch["labels"].shape
        values: list[torch.Tensor] = []

        def note(model: nn.Module, part: Batch) -> torch.Tensor:
            found = self._reduce(model, part, lambda losses: -losses.view(-1, tokens - 1))
            values.append(nn.functional.pad(found, (1, 0)))
            return found

        forward(batch, note)
        known = torch.full((rows, tokens), -torch.inf, device=self._training.args.device)
        if values:
            known = torch.cat(values)[:rows]
        strategy = self._training.strategy
        for axis in ("pipeline", "tensor"):
            if getattr(strategy.topology, axis) > 1:
                # All ranks of a model replica must have the same batch, and only a last stage has logits.
                dist.all_reduce(known, op=dist.ReduceOp.MAX, group=strategy.mesh.get_group(axis))
        return known.cpu()

    @contextmanager
    def _forwarding(self) -> Iterator[Forward]:
        with evaluating(self._training, are_training=True) as forward, self._training.engine.gathered():
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
            self._note(is_target, {"entropy": -log_probabilities})
            if not self._is_of_tokens:
                log_probabilities = log_probabilities.sum(1, keepdim=True)
                old = old.sum(1, keepdim=True)
                is_target = is_target.any(1, keepdim=True)
            ratio = ratio_of(log_probabilities, old)
            losses, is_clipped = clipped_losses(ratio, advantages, clip)
            self._note(is_target, {"clipped_ratios": is_clipped.float()})
            if REFERENCE_LOG_PROBABILITIES in batch:
                difference = batch[REFERENCE_LOG_PROBABILITIES][:, 1:] - log_probabilities
                divergence = difference.exp() - difference - 1
                self._note(is_target, {"kl": divergence})
                # Its gradient counts: without it that of the divergence would be biased.
                losses = losses + self._task.beta * ratio * divergence
            return torch.where(is_target, losses, 0).sum()

        return self._reduce(model, batch, reduce)

    def _reduce(self, model: nn.Module, batch: Batch, reduce: Reduce) -> torch.Tensor:
        return reduce_tokens(self._training.head, model, batch, reduce, temperature=self._task.temperature)

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


def ratio_of(log_probabilities: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Give how much likelier the policy that is trained makes tokens or answers than the one that drew them."""
    # Before `exp`: the gradient of one that overflows would be 0 x infinity.
    return (log_probabilities - old).clamp(max=math.log(_LARGEST_RATIO)).exp()


def clipped_losses(ratio: torch.Tensor, advantages: torch.Tensor, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the losses of tokens or answers, and whether their ratio counts no more; all of one shape.

    Args:
        ratio: ratios of `ratio_of`.
        advantages: advantages of the tokens or answers.
        clip: the most by which a ratio may differ from 1 and still count.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages
