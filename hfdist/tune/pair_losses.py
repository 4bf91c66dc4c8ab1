"""The losses of preferences: each is a function of the scores of a pair's chosen and rejected answer.

A score is log p(answer) - log p_ref(answer), or log p(answer) where there is no reference. Some losses take the mean of
this over the answer's tokens. The arguments and the loss have the shape [pairs].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid, sigmoid

from hfdist.config.task import TaskConfig, TaskLoss

_Loss = Callable[[torch.Tensor, torch.Tensor, TaskConfig], torch.Tensor]
"""Gives the loss of each pair from the scores of its chosen answer and of its rejected answer."""
_TEMPERATURE = 0.05
"""Temperature of discopop in its paper."""
_CERTAIN = -1e-6
"""The largest mean log-probability whose odds are taken: of 0, as documents without a pair have, they are infinite."""


def _sigmoid(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return -logsigmoid(task.beta * (chosen - rejected) - task.margin)


def _robust(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    margin, noise = task.beta * (chosen - rejected), task.label_smoothing
    return (noise * logsigmoid(-margin) - (1 - noise) * logsigmoid(margin)) / (1 - 2 * noise)


def _exo_pair(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    margin, noise = task.beta * (chosen - rejected), task.label_smoothing
    right = sigmoid(margin) * (logsigmoid(margin) - math.log1p(-noise))
    return right + sigmoid(-margin) * (logsigmoid(-margin) - math.log(noise))


def _hinge(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return torch.relu(1 - task.beta * (chosen - rejected))


def _ipo(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return (chosen - rejected - 1 / (2 * task.beta)).square()


def _nca_pair(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    liked, disliked = task.beta * chosen, task.beta * rejected
    return -logsigmoid(liked) - (logsigmoid(-liked) + logsigmoid(-disliked)) / 2


def _bco_pair(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return -logsigmoid(task.beta * chosen) - logsigmoid(-task.beta * rejected)


def _sppo_hard(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return (chosen - 0.5 / task.beta).square() + (rejected + 0.5 / task.beta).square()


def _discopop(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    margin = task.beta * (chosen - rejected)
    # exp(-margin) x sigmoid(margin / temperature): the first alone overflows where the second is nothing.
    exponential = torch.exp(logsigmoid(margin / _TEMPERATURE) - margin)
    return exponential - sigmoid(-margin / _TEMPERATURE) * logsigmoid(margin)


def _apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return 1 - sigmoid(task.beta * chosen) + sigmoid(task.beta * rejected)


def _apo_down(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return sigmoid(task.beta * chosen) + 1 - sigmoid(task.beta * (chosen - rejected))


def _orpo(chosen: torch.Tensor, rejected: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    return -task.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """Give log(p / (1 - p)) for log(p)."""
    log_probability = log_probability.clamp(max=_CERTAIN)
    return log_probability - torch.log(-torch.expm1(log_probability))


class PairLoss(NamedTuple):
    """A loss of pairs, and the scores that it takes."""

    function: _Loss
    takes_means: bool = False
    """Whether scores are means over the tokens of an answer, not sums."""


# Sources, on arXiv: sigmoid 2305.18290, sigmoid_norm 2411.15124, robust 2403.00409, exo_pair 2402.00856,
# hinge 2305.10425, ipo 2310.12036, nca_pair 2402.05369, bco_pair 2404.04656 (without its running mean of rewards),
# sppo_hard 2405.00675, discopop 2406.08414, apo_zero and apo_down 2408.06266, simpo 2405.14734, orpo 2403.07691.
LOSSES: Mapping[TaskLoss, PairLoss] = MappingProxyType(
    {
        TaskLoss.sigmoid: PairLoss(_sigmoid),
        TaskLoss.sigmoid_norm: PairLoss(_sigmoid, takes_means=True),
        TaskLoss.robust: PairLoss(_robust),
        TaskLoss.exo_pair: PairLoss(_exo_pair),
        TaskLoss.hinge: PairLoss(_hinge),
        TaskLoss.ipo: PairLoss(_ipo, takes_means=True),
        TaskLoss.nca_pair: PairLoss(_nca_pair),
        TaskLoss.bco_pair: PairLoss(_bco_pair),
        TaskLoss.sppo_hard: PairLoss(_sppo_hard),
        TaskLoss.discopop: PairLoss(_discopop),
        TaskLoss.apo_zero: PairLoss(_apo_zero),
        TaskLoss.apo_down: PairLoss(_apo_down),
        TaskLoss.simpo: PairLoss(_sigmoid, takes_means=True),
        TaskLoss.orpo: PairLoss(_orpo, takes_means=True),
    }
)
"""Losses by `task.loss`; each is a function of one pair alone, so that a step's loss is their mean in any layout."""
