"""Advantages: how much better each answer to a prompt is than the others, by their rewards.

A group is the answers to one prompt. A reward may score the steps of an answer in place of the whole (arXiv 2402.03300,
section 4.1.3). All rewards of a group are compared together, and the advantage of a token is the sum over the steps
that end at it or later:

    answer       a  b  c . d  e . f         rewards of its steps, compared: r1 at ".", r2 at the second "."
    advantages   s  s  s s r2 r2 r2 0       s = r1 + r2

The reward of a whole answer is one step that ends with it, so all its tokens have one advantage.
"""

from __future__ import annotations

from itertools import chain

import torch

from hfdist.collectives import gather_json
from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch
from hfdist.tune.policy_loss import PolicyLoss, Scale, spread_of
from hfdist.tune.rollout_rows import ADVANTAGES, REWARDS, STEP_ENDS
from hfdist.tune.step_rewards import are_given

_SMALLEST = 1e-4
"""A number that is added to a standard deviation before rewards are divided by it, as TRL does; it may be 0."""


def add_advantages(batches: list[Batch], loss: PolicyLoss, task: TaskConfig, *, data_rank: int) -> list[Batch]:
    """Give batches with the advantages of their answers in place of the rewards. A collective.

    Args:
        batches: batches with REWARDS, in which each `task.num_generations` rows are the answers to one prompt.
        loss: says what rewards are compared with, and what they are divided by.
        task: `task.*` of the run.
        data_rank: data rank of this process; ranks with the same one have the same batches.

    Returns:
        The batches without REWARDS and STEP_ENDS, with ADVANTAGES.
    """
    rewards = torch.cat([batch[REWARDS] for batch in batches])
    is_given = torch.cat([are_given(batch) for batch in batches])
    groups = (len(rewards) // task.num_generations, -1)
    compared = compare(rewards.view(groups), is_given.view(groups), loss, task, data_rank=data_rank)
    by_batch = compared.view(rewards.shape).split([len(batch["labels"]) for batch in batches])
    return [_replace_rewards(batch, advantages) for batch, advantages in zip(batches, by_batch, strict=True)]


def compare(
    rewards: torch.Tensor, is_given: torch.Tensor, loss: PolicyLoss, task: TaskConfig, *, data_rank: int
) -> torch.Tensor:
    """Compare the rewards of each group. A collective.

    Args:
        rewards: rewards of all answers to each prompt; shape [prompts, rewards of a group].
        is_given: whether there is a reward; shape of `rewards`.
        loss: says what rewards are compared with, and what they are divided by.
        task: `task.*` of the run.
        data_rank: data rank of this process.

    Returns:
        Advantages of the same shape, 0 where there is no reward.
    """
    compared = loss.baseline(rewards, is_given)
    if loss.scale is Scale.none or not task.scale_rewards:
        return compared
    if task.scale_rewards == "batch":
        # The spread of the rewards themselves, as with TRL's scale_rewards="batch" (arXiv 2508.08221).
        spread = _spread_of_batch(rewards[is_given], data_rank)
    elif loss.scale is Scale.batch:
        spread = _spread_of_batch(compared[is_given], data_rank)
    else:
        spread = spread_of(compared, is_given)
    return compared / (spread + _SMALLEST).float()


def _spread_of_batch(values: torch.Tensor, data_rank: int) -> torch.Tensor:
    """Give the standard deviation of the values of all data ranks; 0 if there are fewer than two. A collective."""
    # By data rank: the ranks of a model replica have the same values.
    by_data_rank = dict(gather_json([data_rank, values.tolist()]))
    whole = torch.tensor(list(chain.from_iterable(by_data_rank.values())), dtype=torch.float64)
    return whole.std() if len(whole) > 1 else torch.zeros(())


def _replace_rewards(batch: Batch, compared: torch.Tensor) -> Batch:
    """Put advantages in place of the rewards; shape [rows], or [rows, tokens] if there are rewards of steps."""
    others = {name: values for name, values in batch.items() if name not in (REWARDS, STEP_ENDS)}
    if STEP_ENDS not in batch:
        return others | {ADVANTAGES: compared[:, 0]}
    # Where there is no step, `compared` is 0, and 0 is added to the first token.
    at_ends = torch.zeros(batch["labels"].shape).scatter_add(1, batch[STEP_ENDS].clamp(min=0), compared)
    # A sum from the right: of all steps that end at a token or later.
    return others | {ADVANTAGES: at_ends.flip(1).cumsum(1).flip(1)}
