"""PPO (arXiv 1707.06347): a policy, and a head of values that learns how much reward it may still expect.

    reward of a token    -beta x log(p / r); r is of the model that the run begins with; the last one's: + the answer's
    advantage, return    from rewards and values (gae.py); advantages are whitened over the global batch
    loss of a token      -min(ratio A, bounded ratio A) + value_weight x (value - return)^2 / 2

An answer trains once, so values are still those that the step begins with: a bound of their moves would change nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.models.loss.distillation import token_logits
from hfdist.models.value_head import noting_values
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.forwards import evaluating
from hfdist.tune.gae import estimate, rewards_of_tokens, whiten
from hfdist.tune.policy import DIVERGENCE, PolicyGradient
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_rows import ADVANTAGES, REWARDS, STEP_ENDS, trained_tokens
from hfdist.tune.shared_values import share_values

RETURNS = "returns"
"""Key in a batch: what the value before each token should have been, else 0; shape [rows, tokens]."""


class ProximalPolicy(PolicyGradient):
    """A policy with a head of values. An item is a token of an answer."""

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__(task, rollouts)
        self.names = ("value_loss", *self.names)

    def add_advantages(self, batches: list[Batch]) -> list[Batch]:
        """Estimate advantages and returns by the values that the step begins with. A collective."""
        task, trains = self._task, [trained_tokens(batch) for batch in batches]
        with evaluating(self._training, are_training=True) as forward:
            values = [self._values(batch, forward) for batch in batches]
        found = []
        for batch, own in zip(batches, values, strict=True):
            rewards, is_drawn = rewards_of_tokens(batch), batch["labels"] != IGNORED
            if DIVERGENCE in batch:
                self._note(is_drawn, {"kl": batch[DIVERGENCE]})
                rewards = rewards - task.beta * batch[DIVERGENCE]
            found.append(estimate(rewards, own, is_drawn, gamma=task.gamma, lam=task.gae_lambda))
        rank = self._training.strategy.topology.data_rank
        whitened = whiten([one.advantages for one in found], trains, data_rank=rank)
        used = (REWARDS, STEP_ENDS, DIVERGENCE)
        return [
            {name: value for name, value in batch.items() if name not in used}
            | {ADVANTAGES: advantages, RETURNS: one.returns}
            for batch, advantages, one in zip(batches, whitened, found, strict=True)
        ]

    def _values(self, batch: Batch, forward: Forward) -> torch.Tensor:
        """Give the value of the state in which each token is drawn, on the CPU; shape [rows, tokens]. A collective."""
        head = self._training.head

        def of_tokens(model: nn.Module, part: Batch) -> torch.Tensor:
            with nullcontext() if head is None else head.deferring(model), noting_values(model) as found:
                token_logits(model, part)
            return nn.functional.pad(found[0][:, :-1], (1, 0))

        return share_values(self._training, batch, forward, of_tokens)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the tokens, of the policy and of the values."""
        with noting_values(model) as found:
            of_policy = super().loss(model, batch)
        trains = trained_tokens(batch)[:, 1:]
        squares = (found[0][:, :-1] - batch[RETURNS][:, 1:]).square() / 2
        self._note(trains, {"value_loss": squares})
        return of_policy + self._task.value_weight * torch.where(trains, squares, 0).sum()
