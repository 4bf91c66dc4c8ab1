"""Reinforcement learning from rewards, by any of the losses of `policy_loss.py`.

    prompts [p]  ->  G answers each, sampled (rollout.py)  ->  rewards  ->  advantages  ->  the loss of their tokens

An answer trains once. Within the step, the model that it trains gave it: so the old probabilities are those that the
step begins with. Generators may have a policy that is some steps older: they give the old probabilities, and where
ratios are clipped, one above 3 counts as 3 (dual clip, arXiv 1912.09729; TRL truncates importance weights alike).

`task.beta` holds the model to the one that the run begins with; p and r are the probabilities of a token by the two.
beta x ratio x (r / p - log(r / p) - 1) is added to the loss of each token (with the ratio as in arXiv 2512.02556 and
TRL). RLOO takes beta x log(p / r), summed over an answer, off its reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hfdist.collectives import gather_json
from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.models.loss.lazy_logits import Reduce
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Objective, reduce_tokens
from hfdist.trainer.training import Training
from hfdist.tune.policy_loss import POLICY_LOSSES, Mean, Ratios, Scale
from hfdist.tune.reference_weights import ReferenceWeights
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_rows import ADVANTAGES, OLD_LOG_PROBABILITIES, TRAINS

REFERENCE_LOG_PROBABILITIES = "reference_log_probabilities"
"""Key in a batch: log-probabilities of answers' tokens by the reference, else 0; shape [rows, tokens]."""
DIVERGENCE = "divergence"
"""Key in a batch of RLOO: log(p / r) of each token of an answer, else 0; shape [rows, tokens]."""

_SMALLEST = 1e-4
"""Added to a standard deviation, as TRL does."""


class PolicyGradient(Objective):
    """A policy and its rewards. An item is a token of an answer, or an answer."""

    evaluates_itself = True

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__()
        self._task, self._rollouts = task, rollouts
        self._loss = POLICY_LOSSES[task.loss]
        self._reference: ReferenceWeights | None = None
        """The weights to compare with; None: there is no comparison."""
        self._largest = torch.tensor(-torch.inf)
        """Largest logarithm of a ratio since the figures were asked for."""
        own = (["kl"] if task.beta else []) + (["mismatch"] if task.generators else [])
        self.names = ("entropy", "clipped_ratios", *own, *rollouts.names)

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
        found, generators = super().figures(trains=trains), self._rollouts.generators
        if generators is None or not trains:
            return found
        largest, self._largest = self._largest.to(self._training.args.device), torch.tensor(-torch.inf)
        if dist.is_initialized():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return found | {"largest_ratio": largest.exp().item()} | generators.figures()

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the tokens that train, or the answers, with those that do not train."""
        if self._loss.mean is Mean.tokens:
            return _trained(batch).sum()
        return (batch["labels"] != IGNORED).any(1).sum()

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Have the prompts of a step answered; give the answers with their advantages."""
        answered, rewards, figures = self._rollouts.answer(batches, self._forwarding)
        if self._reference is not None:
            with evaluating(self._training, are_training=True) as forward:
                answered = self._compare(answered, forward, self._reference)
        self._training.model.train()
        self._note_answers(figures)
        if self._reference is not None and self._loss.takes_kl_off:
            rewards = rewards - self._task.beta * self._sum_divergences(answered).view(rewards.shape)
        is_answered = torch.cat([(batch["labels"] != IGNORED).any(1) for batch in answered]).view(rewards.shape)
        of_answers = self.advantages(rewards, is_answered).flatten().split([len(batch["labels"]) for batch in answered])
        return [batch | {ADVANTAGES: own} for batch, own in zip(answered, of_answers, strict=True)]

    def _compare(self, batches: Sequence[Batch], forward: Forward, reference: ReferenceWeights) -> list[Batch]:
        """Add the reference's log-probabilities, or the divergence from them, to batches of answers. A collective."""
        with reference.in_place():
            compared = [
                batch | {REFERENCE_LOG_PROBABILITIES: self._log_probabilities(batch, forward)} for batch in batches
            ]
        if not self._loss.takes_kl_off:
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

    def advantages(self, rewards: torch.Tensor, is_answered: torch.Tensor) -> torch.Tensor:
        """Compare the rewards of answers. A collective.

        Args:
            rewards: shape [prompts, answers].
            is_answered: whether there was a prompt; same shape.
        """
        compared = self._loss.baseline(rewards)
        if self._loss.scale is Scale.none or not self._task.scale_rewards:
            return compared
        spread = rewards.std(1, keepdim=True)
        if self._loss.scale is Scale.batch:
            data_rank = self._training.strategy.topology.data_rank
            # The ranks of a model replica have the same.
            found = dict(gather_json([data_rank, compared[is_answered].tolist()]))
            spread = torch.tensor([value for own in found.values() for value in own], dtype=torch.float64).std()
        return compared / (spread + _SMALLEST).float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the items."""
        rows, tokens = batch["labels"].shape

        def reduce(losses: torch.Tensor) -> torch.Tensor:
            log_probabilities = -losses.view(rows, tokens - 1)
            is_target, trains = batch["labels"][:, 1:] != IGNORED, _trained(batch)[:, 1:]
            self._note(is_target, {"entropy": -log_probabilities})
            old = log_probabilities.detach()
            if OLD_LOG_PROBABILITIES in batch:
                old = batch[OLD_LOG_PROBABILITIES][:, 1:]
                self._note_mismatch(is_target, log_probabilities.detach() - old)
            logs = self._loss.level(log_probabilities - old, is_target)
            below, above = self._loss.bounds(self._task)
            ratios = Ratios(log_probabilities, logs, batch[ADVANTAGES][:, None], below, above)
            losses, is_clipped = self._loss.form(ratios)
            is_item = trains if is_clipped.shape == trains.shape else trains.any(1, keepdim=True)
            self._note(is_item, {"clipped_ratios": is_clipped.float()})
            if REFERENCE_LOG_PROBABILITIES in batch:
                difference = batch[REFERENCE_LOG_PROBABILITIES][:, 1:] - log_probabilities
                divergence = difference.exp() - difference - 1
                self._note(is_target, {"kl": divergence})
                # The ratio's gradient counts: without it that of the divergence would be biased.
                losses = losses + self._task.beta * ratios.limited * divergence
            weights = self._loss.token_weights(is_target, self._task.max_new_tokens)
            return torch.where(trains, losses * weights, 0).sum()

        return self._reduce(model, batch, reduce)

    def _note_mismatch(self, is_target: torch.Tensor, log_ratios: torch.Tensor) -> None:
        """Note how far the policy is from the one that drew its tokens."""
        self._note(is_target, {"mismatch": log_ratios.abs()})
        largest = torch.where(is_target, log_ratios, -torch.inf).amax()
        self._largest = torch.maximum(self._largest.to(largest), largest)

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


def _trained(batch: Batch) -> torch.Tensor:
    """Whether a token is one of an answer that trains; shape [rows, tokens]."""
    is_target = batch["labels"] != IGNORED
    return is_target & batch[TRAINS][:, None] if TRAINS in batch else is_target
