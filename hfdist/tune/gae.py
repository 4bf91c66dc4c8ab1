"""Generalized advantage estimation (arXiv 1506.02438) over the tokens that a model has drawn.

token          a     b     x     c          x: what an environment has said; it is skipped
value          v0    v1          v2         the reward that is expected where the model draws the token
reward         r0    r1          r2

g: gamma, l: lambda
surprise       a: r0 + g v1 - v0     b: r1 + g v2 - v1     c: r2 - v2
advantage      a: surprise of a + g l (advantage of b)     b: ...     c: surprise of c
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
"""A number that is added to the variance of advantages, as TRL does: the variance may be 0."""


class Estimates(NamedTuple):
    """Estimates for each token; both have the shape [rows, tokens], and are 0 where the model has drawn none."""

    advantages: torch.Tensor
    """How much more reward than expected follows from the token."""
    returns: torch.Tensor
    """What the value of the state before the token should have been."""


def rewards_of_tokens(batch: Batch) -> torch.Tensor:
    """Put the rewards of a batch at the tokens that end answers, or their steps; shape [rows, tokens]."""
    is_drawn = batch["labels"] != IGNORED
    ends = batch.get(STEP_ENDS)
    if ends is None:
        # One step, which ends with the last drawn token.
        places = torch.arange(is_drawn.shape[1])
        ends = torch.where(is_drawn, places, -1).amax(1, keepdim=True)
    # -1 says that there is no step: 0 is added to the first token.
    rewards = torch.where(ends >= 0, batch[REWARDS], 0)
    return torch.zeros(is_drawn.shape).scatter_add(1, ends.clamp(min=0), rewards)


def estimate(
    rewards: torch.Tensor, values: torch.Tensor, is_drawn: torch.Tensor, *, gamma: float, lam: float
) -> Estimates:
    """Estimate advantages and returns of the tokens that the model has drawn.

    Nothing is expected after the last token of an answer, also of one that was cut off.

    Args:
        rewards: reward of each token; shape [rows, tokens].
        values: reward that is expected where each token is drawn; shape [rows, tokens].
        is_drawn: whether the model has drawn a token; shape [rows, tokens].
        gamma: what a reward counts one token earlier.
        lam: lambda: what a later surprise counts one token earlier.
    """
    advantages = torch.zeros_like(rewards)
    # Value and advantage of the next drawn token of each row.
    next_value, next_advantage = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        is_here = is_drawn[:, place]
        surprise = rewards[:, place] + gamma * next_value - values[:, place]
        next_advantage = torch.where(is_here, surprise + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_here, values[:, place], next_value)
        advantages[:, place] = torch.where(is_here, next_advantage, 0)
    return Estimates(advantages, torch.where(is_drawn, advantages + values, 0))


def whiten(advantages: Sequence[torch.Tensor], trains: Sequence[torch.Tensor], *, data_rank: int) -> list[torch.Tensor]:
    """Give advantages a mean of 0 and a variance of 1 over the tokens of the global batch that train. A collective.

    Args:
        advantages: advantages of each batch of this data rank; shape [rows, tokens] each.
        trains: whether a token trains, for each batch; shapes of `advantages`.
        data_rank: data rank of this process; ranks with the same one have the same batches.

    Returns:
        Advantages of the same shapes, 0 for tokens that do not train.
    """
    trained = torch.cat([values[which] for values, which in zip(advantages, trains, strict=True)]).double()
    count, total = _add_up([len(trained), trained.sum().item()], data_rank)
    mean = total / max(count, 1)
    [squares] = _add_up([(trained - mean).square().sum().item()], data_rank)
    # One token alone has no variance.
    scale = (squares / max(count - 1, 1) + _SMALLEST) ** -0.5
    return [torch.where(which, (values - mean) * scale, 0) for values, which in zip(advantages, trains, strict=True)]


def _add_up(numbers: list[float], data_rank: int) -> list[float]:
    """Add up numbers of data ranks, in one order, so that all ranks have the same sums. A collective."""
    # By data rank: the ranks of a model replica have the same numbers, which count once.
    by_data_rank = dict(gather_json([data_rank, numbers]))
    ordered = [by_data_rank[rank] for rank in sorted(by_data_rank)]
    return [sum(column) for column in zip(*ordered, strict=True)]
