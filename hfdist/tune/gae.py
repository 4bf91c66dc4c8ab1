"""Generalized advantage estimation (arXiv 1506.02438) over the tokens that a model has drawn.

token          a     b     x     c          x: what an environment has said; it is skipped
value          v0    v1          v2         of the state in which the model draws the token
reward         r0    r1          r2
surprise       r0 + g v1 - v0    r2 - v2    g: gamma
advantage      of a: its surprise + g l (advantage of b)          l: lambda
return         advantage + value: what the value should have been
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hfdist.collectives import gather_json
from hfdist.config.batch import IGNORED
from hfdist.strategies.engine import Batch
from hfdist.tune.rollout_rows import REWARDS, STEP_ENDS

_SMALLEST = 1e-8
"""Added to the variance of advantages, as TRL does."""


class Estimates(NamedTuple):
    """What is known of each token; shape [rows, tokens], 0 where the model has drawn none."""

    advantages: torch.Tensor
    returns: torch.Tensor


def rewards_of_tokens(batch: Batch) -> torch.Tensor:
    """Put the rewards of a batch at the tokens that end answers, or their steps; shape [rows, tokens]."""
    rewards, is_drawn = batch[REWARDS], batch["labels"] != IGNORED
    ends = batch.get(STEP_ENDS)
    if ends is None:
        places = torch.arange(is_drawn.shape[1])
        ends = torch.where(is_drawn, places, -1).amax(1, keepdim=True)
    given = torch.where(ends >= 0, rewards, 0)
    return torch.zeros(is_drawn.shape).scatter_add(1, ends.clamp(min=0), given)


def estimate(
    rewards: torch.Tensor, values: torch.Tensor, is_drawn: torch.Tensor, *, gamma: float, lam: float
) -> Estimates:
    """Estimate from rewards and values of the tokens that `is_drawn` names; all of shape [rows, tokens].

    Nothing is expected after the last token of an answer, also of one that was cut off.
    """
    advantages = torch.zeros_like(rewards)
    later_value, later = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        own = is_drawn[:, place]
        surprise = rewards[:, place] + gamma * later_value - values[:, place]
        later = torch.where(own, surprise + gamma * lam * later, later)
        later_value = torch.where(own, values[:, place], later_value)
        advantages[:, place] = torch.where(own, later, 0)
    return Estimates(advantages, torch.where(is_drawn, advantages + values, 0))


def whiten(advantages: Sequence[torch.Tensor], trains: Sequence[torch.Tensor], *, data_rank: int) -> list[torch.Tensor]:
    """Give advantages a mean of 0 and a variance of 1 over the tokens of the global batch that train. A collective.

    Args:
        advantages: of the batches of this data rank; each of shape [rows, tokens].
        trains: whether a token trains; shapes as of `advantages`.
        data_rank: of this process; ranks with the same one have the same batches.
    """
    own = torch.cat([values[which] for values, which in zip(advantages, trains, strict=True)]).double()
    count, total = _add_up([len(own), own.sum().item()], data_rank)
    mean = total / max(count, 1)
    [squares] = _add_up([(own - mean).square().sum().item()], data_rank)
    # One token alone has no variance.
    scale = (squares / max(count - 1, 1) + _SMALLEST) ** -0.5
    return [torch.where(which, (values - mean) * scale, 0) for values, which in zip(advantages, trains, strict=True)]


def _add_up(numbers: list[float], data_rank: int) -> list[float]:
    """Add up numbers of data ranks, in one order, so that all ranks have the same sums. A collective."""
    of_ranks = dict(gather_json([data_rank, numbers]))
    return [sum(column) for column in zip(*(of_ranks[one] for one in sorted(of_ranks)), strict=True)]
