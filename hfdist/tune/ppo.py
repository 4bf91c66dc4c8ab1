"""PPO (arXiv 1707.06347): a policy, and a head of values that learns how much reward it may still expect.

    reward of a token    -beta x log(p / r), with r by the model that the run begins with; the last token of an answer
                         gets the reward of the answer, too
    advantage, return    from rewards and values (gae.py); advantages are whitened over the global batch
    loss of a token      -min(ratio A, bounded ratio A) + value_weight x (value - return)^2 / 2

An answer trains once, with the values that the step begins with. So values need no bound on how far they move, as they
have it where an answer trains several times.
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
from hfdist.tune.gae import Estimates, estimate, rewards_of_tokens, whiten
from hfdist.tune.policy import DIVERGENCE, PolicyGradient
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_rows import ADVANTAGES, REWARDS, STEP_ENDS, trained_tokens
from hfdist.tune.shared_values import share_values

RETURNS = "returns"
"""Key in a batch: what the value before each drawn token should have been, 0 at others; shape [rows, tokens]."""


class ProximalPolicy(PolicyGradient):
    """A policy with a head of values. An item is a token of an answer."""

    def __init__(self, task: TaskConfig, rollouts: Rollouts) -> None:
        super().__init__(task, rollouts)
        self.names = ("value_loss", *self.names)

    def add_advantages(self, batches: list[Batch]) -> list[Batch]:
        """Put advantages and returns in place of the rewards, by the values that the step begins with. A collective."""
        with evaluating(self._training, are_training=True) as forward:
            values = [self._values(batch, forward) for batch in batches]
        estimates = [self._estimate(*pair) for pair in zip(batches, values, strict=True)]
        whitened = whiten(
            [one.advantages for one in estimates],
            [trained_tokens(batch) for batch in batches],
            data_rank=self._training.strategy.topology.data_rank,
        )
        estimated = []
        for batch, advantages, one in zip(batches, whitened, estimates, strict=True):
            others = {name: value for name, value in batch.items() if name not in (REWARDS, STEP_ENDS, DIVERGENCE)}
            estimated.append(others | {ADVANTAGES: advantages, RETURNS: one.returns})
        return estimated

    def _estimate(self, batch: Batch, values: torch.Tensor) -> Estimates:
        """Estimate advantages and returns of a batch, with the divergence taken off the rewards of its tokens."""
        task = self._task
        rewards, is_drawn = rewards_of_tokens(batch), batch["labels"] != IGNORED
        if DIVERGENCE in batch:
            self._note(is_drawn, {"kl": batch[DIVERGENCE]})
            rewards = rewards - task.beta * batch[DIVERGENCE]
        return estimate(rewards, values, is_drawn, gamma=task.gamma, lam=task.gae_lambda)

    def _values(self, batch: Batch, forward: Forward) -> torch.Tensor:
        """Give the value of the state in which each token is drawn, on the CPU; shape [rows, tokens]. A collective."""
        head = self._training.head

        def values_of(model: nn.Module, part: Batch) -> torch.Tensor:
            # Logits are not wanted: a head that can defer them makes none.
            deferring = nullcontext() if head is None else head.deferring(model)
            with deferring, noting_values(model) as noted:
                token_logits(model, part)
            [values] = noted
            # The state after a token is that in which the next one is drawn.
            return nn.functional.pad(values[:, :-1], (1, 0))

        return share_values(self._training, batch, forward, values_of)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's tokens: those of the policy, and those of the values."""
        with noting_values(model) as noted:
            policy_loss = super().loss(model, batch)
        [values] = noted
        trains = trained_tokens(batch)[:, 1:]
        squares = (values[:, :-1] - batch[RETURNS][:, 1:]).square() / 2
        self._note(trains, {"value_loss": squares})
        return policy_loss + self._task.value_weight * torch.where(trains, squares, 0).sum()
