"""Reinforcement learning from rewards, by any of the losses of `policy_loss.py`.

    prompts [p]  ->  G answers each, sampled (rollout.py)  ->  rewards  ->  advantages  ->  the loss of their tokens

An answer trains once, in the step that has sampled it. So the old probabilities, to which ratios compare the new ones,
are those that the step begins with. Generators may have a policy that is some steps older: then the old probabilities
come with the answers, and a ratio above `task.delta` counts as `task.delta` (dual clip, arXiv 1912.09729).

`task.beta` holds the model to the reference, the model that the run begins with. p and r are the probabilities of a
token by the two. beta x ratio x (r / p - log(r / p) - 1) is added to the loss of each token (with the ratio as in arXiv
2512.02556 and TRL). RLOO takes beta x log(p / r), summed over an answer, off its reward; PPO takes it off the reward of
each token (ppo.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hfdist.collectives import on_all_ranks
from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.errors import DataError
from hfdist.models.loss.deferred_rows import Reduce
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import reduce_tokens
from hfdist.tune.advantages import add_advantages
from hfdist.tune.live_prompts import keep_live
from hfdist.tune.own_answers import OwnAnswers
from hfdist.tune.policy_loss import POLICY_LOSSES, Mean, Ratios, answer_log_ratios, mean_log_ratios
from hfdist.tune.reference_weights import ReferenceWeights
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_rows import (
    ADVANTAGES,
    OLD_LOG_PROBABILITIES,
    REWARDS,
    STEP_ENDS,
    are_answered,
    trained_tokens,
)
from hfdist.tune.shared_values import share_values

REFERENCE_LOG_PROBABILITIES = "reference_log_probabilities"
"""Key in a batch: log-probabilities of answers' tokens by the reference, else 0; shape [rows, tokens]."""
DIVERGENCE = "divergence"
"""Key in a batch of RLOO and PPO: log(p / r) of each token of an answer, else 0; shape [rows, tokens]."""


class PolicyGradient(OwnAnswers):
    """A policy and its rewards. An item is a token of an answer, or an answer."""

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__(task, rollouts)
        self._loss = POLICY_LOSSES[task.loss]
        self._largest = torch.tensor(-torch.inf)
        """Largest logarithm of a ratio since the last call of `figures`."""
        names = ["entropy", "clipped_ratios"]
        if task.beta:
            names.append("kl")
        if task.uses_generators:
            names.append("mismatch")
        self.names = (*names, *rollouts.names)

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Give the figures of answers, and of a training with generators also theirs. A collective."""
        figures, generators = super().figures(trains=trains), self._rollouts.generators
        if generators is None or not trains:
            return figures
        largest, self._largest = self._largest.to(self._training.args.device), torch.tensor(-torch.inf)
        if dist.is_initialized():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return figures | {"largest_ratio": largest.exp().item()} | generators.figures()

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the tokens that train; or, where an item is an answer, all answers, also those that do not train."""
        if self._loss.mean is Mean.tokens:
            return trained_tokens(batch).sum()
        return are_answered(batch).sum()

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Have the prompts of a step answered; give the answers that train, with their advantages. A collective."""
        task, topology = self._task, self._training.strategy.topology
        answered = self.answer(batches)
        if self._loss.level is answer_log_ratios:
            on_all_ranks(lambda: self._refuse_steps(answered))
        if task.trained_prompts is not None:
            answered = keep_live(answered, task.trained_prompts, task.num_generations, topology)
        if self._reference is not None:
            with evaluating(self._training, are_training=True) as forward:
                answered = self._compare(answered, forward, self._reference)
        return self.add_advantages(answered)

    def add_advantages(self, batches: list[Batch]) -> list[Batch]:
        """Give batches with the advantages of their answers in place of the rewards. A collective."""
        if self._reference is not None and self._loss.takes_kl_off:
            batches = [self._take_divergence_off(batch) for batch in batches]
        topology = self._training.strategy.topology
        return add_advantages(batches, self._loss, self._task, data_rank=topology.data_rank)

    def _refuse_steps(self, batches: Sequence[Batch]) -> None:
        """Raise a DataError if a reward has scored the steps of answers."""
        if any(STEP_ENDS in batch for batch in batches):
            what, hint = "a loss of whole answers knows no rewards of steps", "task=grpo, or another reward"
            raise DataError(what, where="task.rewards", found=f"task.loss={self._task.loss.value}", hint=hint)

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

    def _take_divergence_off(self, batch: Batch) -> Batch:
        """Take the divergence, summed over the tokens of an answer, off its reward."""
        self._note(batch["labels"] != IGNORED, {"kl": batch[DIVERGENCE]})
        return batch | {REWARDS: batch[REWARDS] - self._task.beta * batch[DIVERGENCE].sum(1, keepdim=True)}

    def _log_probabilities(self, batch: Batch, forward: Forward) -> torch.Tensor:
        """Give log-probabilities of answers' tokens, 0 elsewhere, on the CPU; shape [rows, tokens]. A collective."""
        tokens = batch["labels"].shape[1]

        def log_probabilities_of(model: nn.Module, part: Batch) -> torch.Tensor:
            shifted = self._reduce(model, part, lambda losses: -losses.view(-1, tokens - 1))
            return nn.functional.pad(shifted, (1, 0))

        return share_values(self._training, batch, forward, log_probabilities_of)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's items."""
        rows, tokens = batch["labels"].shape

        def reduce(losses: torch.Tensor) -> torch.Tensor:
            return self._sum_losses(batch, -losses.view(rows, tokens - 1))

        return self._reduce(model, batch, reduce)

    def _sum_losses(self, batch: Batch, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Sum the losses of a batch by the log-probability of each token but the first; shape [rows, tokens - 1]."""
        is_target, trains = batch["labels"][:, 1:] != IGNORED, trained_tokens(batch)[:, 1:]
        self._note(is_target, {"entropy": -log_probabilities})
        old = self._old_log_probabilities(batch, log_probabilities.detach(), is_target)
        ratios = self._ratios(batch, log_probabilities, old, is_target)
        losses, is_clipped = self._loss.form(ratios)
        most = self._task.off_policy_mask_threshold
        if most is not None:
            distances = mean_log_ratios(old - log_probabilities.detach(), is_target)
            # A bad answer that is far from the policy does not count (arXiv 2512.02556).
            losses = losses * ((ratios.advantages >= 0) | (distances <= most))
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

    def _old_log_probabilities(self, batch: Batch, new: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
        """Give the log-probabilities that came with generators' answers, and note their mismatch; else the new ones."""
        if OLD_LOG_PROBABILITIES not in batch:
            return new
        old = batch[OLD_LOG_PROBABILITIES][:, 1:]
        self._note_mismatch(is_target, new - old)
        return old

    def _ratios(
        self, batch: Batch, log_probabilities: torch.Tensor, old: torch.Tensor, is_target: torch.Tensor
    ) -> Ratios:
        """Make the ratios of new to old probabilities, with the advantages and bounds of `task.*`."""
        advantages = batch[ADVANTAGES]
        below, above = self._loss.bounds(self._task)
        return Ratios(
            log_probabilities=log_probabilities,
            logs=self._loss.level(log_probabilities - old, is_target),
            advantages=advantages[:, 1:] if advantages.ndim > 1 else advantages[:, None],
            below=below,
            above=above,
            largest=self._task.delta,
        )

    def _note_mismatch(self, is_target: torch.Tensor, log_ratios: torch.Tensor) -> None:
        """Note how far the policy is from the one that drew its tokens."""
        self._note(is_target, {"mismatch": log_ratios.abs()})
        largest = torch.where(is_target, log_ratios, -torch.inf).amax()
        self._largest = torch.maximum(self._largest.to(largest), largest)

    def _reduce(self, model: nn.Module, batch: Batch, reduce: Reduce) -> torch.Tensor:
        """Run a forward, and give what `reduce` makes of the losses of all tokens but the first of each row."""
        return reduce_tokens(self._training, model, batch, reduce, temperature=self._task.temperature)
