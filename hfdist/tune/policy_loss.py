"""Losses of policies, a line each: four choices that do not depend on each other, and the bounds of ratios.

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

import torch

from hfdist.config.task import TaskConfig, TaskLoss

_MOST_LOG_RATIO = 20.0
"""Ratios above its exponential are saturated in every form; `exp` stays far from an overflow."""
_POSITIVE_TEMPERATURE, _NEGATIVE_TEMPERATURE = 1.0, 1.05
"""How steep SAPO's sigmoid is for answers that did better than others, and for the rest."""
_LEAST_LOG_RATIO = math.log(1e-8)
"""Least logarithm of VESPO's ratios of answers: its factor is nothing there."""
_BETTER_GAMMA, _OTHER_GAMMA = (2.0, 3.0), (3.0, 2.0)
"""The exponent k and the decay l of VESPO's factor, for answers that did better than others, and for the rest."""


class Scale(Enum):
    """What advantages are divided by: a standard deviation of the group or of the global batch, or nothing."""

    group = "group"
    batch = "batch"
    none = "none"


class Mean(Enum):
    """What a step's loss is a mean over.

    `tokens`: all tokens alike; `answers`: each answer's mean; `sums`: each answer's sum; `full_answers`: that over
    `max_new_tokens`.
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
    """Take the mean of a group's other rewards off each."""
    return torch.where(is_given, rewards - (_sum(rewards, is_given) - rewards) / (_count(is_given) - 1).clamp(min=1), 0)


def spread_of(compared: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    """Give the standard deviation of each group, whose rewards have a mean of 0; shape [prompts, 1]."""
    return (_sum(compared.square(), is_given) / (_count(is_given) - 1).clamp(min=1)).sqrt()


def _sum(rewards: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    return torch.where(is_given, rewards, 0).sum(1, keepdim=True)


def _count(is_given: torch.Tensor) -> torch.Tensor:
    return is_given.sum(1, keepdim=True).clamp(min=1)


# ---- level: log-ratios of tokens [rows, tokens], 0 outside of answers -> [rows, tokens or 1] ----


def of_tokens(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Leave each token its own ratio."""
    return log_ratios


def of_answers(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Give each answer its ratio."""
    return log_ratios.sum(1, keepdim=True)


def of_answers_by_token(log_ratios: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Give each answer the geometric mean of its tokens' ratios."""
    return log_ratios.sum(1, keepdim=True) / is_target.sum(1, keepdim=True).clamp(min=1)


# ---- form: losses, and whether their ratio is out of bounds ----


@dataclass(frozen=True)
class Ratios:
    """What a form makes losses of."""

    log_probabilities: torch.Tensor
    """Shape [rows, tokens]."""
    logs: torch.Tensor
    """Logarithms of ratios; shape [rows, tokens], or [rows, 1] if they are of answers."""
    advantages: torch.Tensor
    """Shape [rows, 1], or [rows, tokens] if steps of answers have rewards."""
    below: float
    """How far a ratio may lie below 1 and count fully."""
    above: float
    """How far it may lie above 1."""
    largest: float
    """The largest that counts: otherwise a bad answer that has become likely would outweigh all others."""

    @property
    def limited(self) -> torch.Tensor:
        """The ratios up to the largest that counts; shape of `logs`."""
        # Before `exp`: the gradient of one that overflows would be 0 x infinity.
        return self.logs.clamp(max=math.log(self.largest)).exp()


def clipped(ratios: Ratios) -> tuple[torch.Tensor, torch.Tensor]:
    """Do not reward an answer for a ratio out of bounds (PPO, arXiv 1707.06347)."""
    ratio, advantages = ratios.limited, ratios.advantages
    bounded = ratio.clamp(1 - ratios.below, 1 + ratios.above)
    return -torch.minimum(ratio * advantages, bounded * advantages), bounded * advantages < ratio * advantages


def truncated(ratios: Ratios) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight each token by its ratio up to the upper bound, without a gradient: every token keeps its own."""
    most = math.log1p(ratios.above)
    weights = ratios.logs.detach().clamp(max=most).exp()
    return -weights * ratios.advantages * ratios.log_probabilities, ratios.logs > most


def smooth(ratios: Ratios) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the gradient fade away from a ratio of 1, without bounds."""
    ratio, advantages = ratios.logs.clamp(max=_MOST_LOG_RATIO).exp(), ratios.advantages
    steepness = torch.where(advantages > 0, _POSITIVE_TEMPERATURE, _NEGATIVE_TEMPERATURE)
    return -torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness * advantages, torch.zeros_like(ratio).bool()


def weighted(ratios: Ratios) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight each token by e^l w^k e^(-l w), without a gradient; w is the ratio of its answer, and 1 weighs 1."""
    logs = ratios.logs.detach().sum(1, keepdim=True).clamp(_LEAST_LOG_RATIO, _MOST_LOG_RATIO)
    better, others = (decay + k * logs - decay * logs.exp() for k, decay in (_BETTER_GAMMA, _OTHER_GAMMA))
    weights = torch.where(ratios.advantages >= 0, better, others).exp()
    return -weights * ratios.advantages * ratios.log_probabilities, torch.zeros_like(ratios.logs).bool()


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The choices of a loss; what is not said is as in GRPO."""

    baseline: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = less_group
    scale: Scale = Scale.group
    level: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = of_tokens
    form: Callable[[Ratios], tuple[torch.Tensor, torch.Tensor]] = clipped
    mean: Mean = Mean.tokens
    below: float = 0.2
    """How far a ratio may lie below 1, unless `task.clip` says it."""
    above: float = 0.2
    """How far it may lie above 1, unless `task.clip_high` or `task.clip` says it."""
    takes_kl_off: bool = False
    """Whether the divergence from the first model is taken off the reward of an answer; else it is in the loss."""

    def bounds(self, task: TaskConfig) -> tuple[float, float]:
        """Give how far a ratio may lie below and above 1."""
        above = task.clip if task.clip_high is None else task.clip_high
        return self.below if task.clip is None else task.clip, self.above if above is None else above

    def token_weights(self, is_target: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        """Give what the losses of tokens are multiplied by, before they are summed and divided by the items.

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
    TaskLoss.gspo: PolicyLoss(level=of_answers_by_token, mean=Mean.answers, below=3e-4, above=4e-4),
    TaskLoss.cispo: PolicyLoss(form=truncated, above=4.0),
    TaskLoss.sapo: PolicyLoss(form=smooth, mean=Mean.answers),
    TaskLoss.vespo: PolicyLoss(form=weighted),
    TaskLoss.luspo: PolicyLoss(level=of_answers_by_token, mean=Mean.sums, below=3e-4, above=4e-4),
    TaskLoss.reinforce_pp: PolicyLoss(scale=Scale.batch),
    TaskLoss.rloo: PolicyLoss(
        baseline=less_others, scale=Scale.none, level=of_answers, mean=Mean.answers, takes_kl_off=True
    ),
    # Advantages of PPO are those of gae.py, which compares an answer with no other.
    TaskLoss.ppo: PolicyLoss(takes_kl_off=True),
}
"""Each by `task.loss`; docs/reinforcement.md has the papers."""
