"""Losses of policies: each is a choice for four independent parts, and the bounds of ratios.

A     the advantage of an answer: its reward, compared with the rewards of others      baseline, scale
r     new over old probability, of a token or of an answer                             level
loss  of a token or an answer, such as -min(r A, bounded r A)                          form
mean  over the tokens or the answers of the global batch                               mean
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from hfdist.config.task import TaskConfig, TaskLoss

_MOST_LOG_RATIO = 20.0
"""Ratios above its exponential are saturated in every form; `exp` stays far from an overflow."""
_POSITIVE_TEMPERATURE, _NEGATIVE_TEMPERATURE = 1.0, 1.05
"""How steep SAPO's sigmoid is for answers that did better than others, and for the rest, as in its paper."""
_LEAST_LOG_RATIO = math.log(1e-8)
"""Least logarithm of VESPO's ratios of answers: its factor is nothing there."""


class _Gamma(NamedTuple):
    """The factor w^k e^(l - l w) of VESPO for a ratio w, which is 1 for the ratio 1."""

    k: float
    decay: float
    """The number l."""

    def log(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """Give the logarithm of the factor."""
        return self.decay + self.k * log_ratios - self.decay * log_ratios.exp()


_BETTER_GAMMA, _OTHER_GAMMA = _Gamma(k=2.0, decay=3.0), _Gamma(k=3.0, decay=2.0)
"""VESPO's factors for answers that did better than others, and for the rest, as in its paper."""


class Scale(Enum):
    """What advantages are divided by: a standard deviation of the group or of the global batch, or nothing."""

    group = "group"
    batch = "batch"
    none = "none"


class Mean(Enum):
    """What a step's loss is a mean over.

    `tokens`: the losses of all tokens; `answers`: the mean of each answer's tokens; `sums`: the sum of each answer's
    tokens; `full_answers`: that sum, divided by `max_new_tokens`.
    """

    tokens = "tokens"
    answers = "answers"
    sums = "sums"
    full_answers = "full_answers"


# ---- baseline: [prompts, rewards of a group] -> the same shape ----


def less_group(rewards: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    """Take the mean of a group off each of its rewards; `is_given` says where there is a reward."""
    return torch.where(is_given, rewards - _sum(rewards, is_given) / _count(is_given), 0)


def less_others(rewards: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    """Take the mean of a group's other rewards off each of its rewards; `is_given` says where there is a reward."""
    others = _sum(rewards, is_given) - rewards
    num_others = (_count(is_given) - 1).clamp(min=1)
    return torch.where(is_given, rewards - others / num_others, 0)


def spread_of(compared: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    """Give the standard deviation of each group, whose rewards have a mean of 0; shape [prompts, 1]."""
    return (_sum(compared.square(), is_given) / (_count(is_given) - 1).clamp(min=1)).sqrt()


def _sum(rewards: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    return torch.where(is_given, rewards, 0).sum(1, keepdim=True)


def _count(is_given: torch.Tensor) -> torch.Tensor:
    return is_given.sum(1, keepdim=True).clamp(min=1)


# ---- level: log-ratios of tokens [rows, tokens], 0 outside of answers -> [rows, tokens or 1] ----


def token_log_ratios(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Leave each token its own ratio; shape [rows, tokens]."""
    return log_ratios


def answer_log_ratios(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Give the ratio of each answer, the product of its tokens' ratios; shape [rows, 1]."""
    return log_ratios.sum(1, keepdim=True)


def mean_log_ratios(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Give the geometric mean of the ratios of each answer's tokens; shape [rows, 1]."""
    return log_ratios.sum(1, keepdim=True) / is_target.sum(1, keepdim=True).clamp(min=1)


# ---- form: losses, and whether their ratio is out of bounds ----


@dataclass(frozen=True)
class Ratios:
    """What a form makes losses of."""

    log_probabilities: torch.Tensor
    """Log-probability of each token by the model that is trained; shape [rows, tokens]."""
    logs: torch.Tensor
    """Logarithms of ratios; shape [rows, tokens], or [rows, 1] for ratios of answers."""
    advantages: torch.Tensor
    """Advantages of answers, [rows, 1], or of tokens, [rows, tokens]."""
    below: float
    """How far a ratio may lie below 1 and count fully."""
    above: float
    """How far a ratio may lie above 1 and count fully."""
    largest: float
    """The largest ratio that counts: otherwise a bad answer that has become likely would outweigh all others."""

    @property
    def limited(self) -> torch.Tensor:
        """The ratios up to the largest that counts; shape of `logs`."""
        # Before `exp`: the gradient of one that overflows would be 0 x infinity.
        return self.logs.clamp(max=math.log(self.largest)).exp()


class RatioLosses(NamedTuple):
    """What a form gives; both tensors have a value for each token, or one for each answer."""

    losses: torch.Tensor
    is_clipped: torch.Tensor
    """Whether a ratio was out of bounds, and did not count fully."""


def clipped(ratios: Ratios) -> RatioLosses:
    """Do not reward an answer for a ratio out of bounds (PPO, arXiv 1707.06347)."""
    ratio, advantages = ratios.limited, ratios.advantages
    bounded = ratio.clamp(1 - ratios.below, 1 + ratios.above)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    return RatioLosses(losses, bounded * advantages < ratio * advantages)


def truncated(ratios: Ratios) -> RatioLosses:
    """Weight each token by its ratio up to the upper bound; weights have no gradient, so every token keeps its own."""
    most = math.log1p(ratios.above)
    weights = ratios.logs.detach().clamp(max=most).exp()
    return RatioLosses(-weights * ratios.advantages * ratios.log_probabilities, ratios.logs > most)


def smooth(ratios: Ratios) -> RatioLosses:
    """Let the gradient fade away from a ratio of 1, without bounds."""
    ratio, advantages = ratios.logs.clamp(max=_MOST_LOG_RATIO).exp(), ratios.advantages
    steepness = torch.where(advantages > 0, _POSITIVE_TEMPERATURE, _NEGATIVE_TEMPERATURE)
    # The sigmoid has the slope 1/4 at 0: so the gradient at a ratio of 1 is that of ratio x advantage.
    losses = -torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness * advantages
    return RatioLosses(losses, torch.zeros_like(ratio).bool())


def weighted(ratios: Ratios) -> RatioLosses:
    """Weight each token by a factor of its answer's ratio, `_Gamma`; weights have no gradient."""
    answer_logs = ratios.logs.detach().sum(1, keepdim=True).clamp(_LEAST_LOG_RATIO, _MOST_LOG_RATIO)
    log_weights = torch.where(ratios.advantages >= 0, _BETTER_GAMMA.log(answer_logs), _OTHER_GAMMA.log(answer_logs))
    losses = -log_weights.exp() * ratios.advantages * ratios.log_probabilities
    return RatioLosses(losses, torch.zeros_like(ratios.logs).bool())


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The choices of a loss; the defaults are those of GRPO."""

    baseline: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = less_group
    """Compares the rewards of each group, by rewards and whether they are given."""
    scale: Scale = Scale.group
    level: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = token_log_ratios
    """Makes log-ratios of tokens or of answers, by log-ratios of tokens and whether they are of an answer."""
    form: Callable[[Ratios], RatioLosses] = clipped
    mean: Mean = Mean.tokens
    below: float = 0.2
    """How far a ratio may lie below 1, unless `task.clip` is given."""
    above: float = 0.2
    """How far a ratio may lie above 1, unless `task.clip_high` or `task.clip` is given."""
    takes_kl_off: bool = False
    """Whether the divergence from the reference is taken off the reward of an answer; else it is in the loss."""

    def bounds(self, task: TaskConfig) -> tuple[float, float]:
        """Give how far a ratio may lie below 1, and how far above."""
        below, above = self.below, self.above
        if task.clip is not None:
            below = above = task.clip
        if task.clip_high is not None:
            above = task.clip_high
        return below, above

    def token_weights(self, is_target: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        """Give the weights of tokens' losses, before these are summed and divided by the number of items.

        Args:
            is_target: whether a token is one of an answer; shape [rows, tokens].
            max_new_tokens: most tokens of an answer.

        Returns:
            Weights of shape [rows, 1].
        """
        lengths = is_target.sum(1, keepdim=True).clamp(min=1)
        match self.mean:
            case Mean.tokens | Mean.sums:
                return torch.ones_like(lengths)
            case Mean.answers:
                return 1 / lengths
            case Mean.full_answers:
                return torch.full_like(lengths, 1 / max_new_tokens, dtype=torch.float32)


POLICY_LOSSES = {
    TaskLoss.grpo: PolicyLoss(),
    TaskLoss.dapo: PolicyLoss(above=0.28),
    TaskLoss.dr_grpo: PolicyLoss(scale=Scale.none, mean=Mean.full_answers),
    TaskLoss.gspo: PolicyLoss(level=mean_log_ratios, mean=Mean.answers, below=3e-4, above=4e-4),
    TaskLoss.cispo: PolicyLoss(form=truncated, above=4.0),
    TaskLoss.sapo: PolicyLoss(form=smooth, mean=Mean.answers),
    TaskLoss.vespo: PolicyLoss(form=weighted),
    TaskLoss.luspo: PolicyLoss(level=mean_log_ratios, mean=Mean.sums, below=3e-4, above=4e-4),
    TaskLoss.reinforce_pp: PolicyLoss(scale=Scale.batch),
    TaskLoss.rloo: PolicyLoss(
        baseline=less_others, scale=Scale.none, level=answer_log_ratios, mean=Mean.answers, takes_kl_off=True
    ),
    # PPO has no baseline and no scale: gae.py estimates its advantages, and compares an answer with no other.
    TaskLoss.ppo: PolicyLoss(takes_kl_off=True),
}
"""Losses by `task.loss`; docs/reinforcement.md has the papers."""
