"""Advantages: the rewards of a group, compared with each other; of answers, or of the steps of answers.

A reward may score the steps of an answer in place of the whole (arXiv 2402.03300, section 4.1.3). All rewards of a
group are compared together, and the advantage of a token is the sum over the steps that end at it or later:

    answer       a  b  c . d  e . f         rewards of its steps, compared: r1 at ".", r2 at the second "."
    advantages   s  s  s s r2 r2 r2 0       s = r1 + r2

The reward of a whole answer is one step that ends with it, so all its tokens have one advantage.
"""

from __future__ import annotations

import torch

from hfdist.collectives import gather_json
from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch
from hfdist.tune.policy_loss import PolicyLoss, Scale, spread_of
from hfdist.tune.rollout_rows import ADVANTAGES, REWARDS, STEP_ENDS
from hfdist.tune.step_rewards import are_given

_SMALLEST = 1e-4
"""Added to a standard deviation, as TRL does."""


def add_advantages(batches: list[Batch], loss: PolicyLoss, task: TaskConfig, *, data_rank: int) -> list[Batch]:
    """Give batches with the advantages of their answers in place of the rewards. A collective.

    Args:
        batches: with REWARDS, whose groups of `task.num_generations` rows are the answers to one prompt.
        loss: says what rewards are compared with, and what they are divided by.
        task: settings of the run.
        data_rank: of this process; ranks with the same one have the same batches.
    """
    rewards = torch.cat([batch[REWARDS] for batch in batches])
    is_given = torch.cat([are_given(batch) for batch in batches])
    groups = (len(rewards) // task.num_generations, -1)
    compared = compare(rewards.view(groups), is_given.view(groups), loss, task, data_rank=data_rank)
    of_batches = compared.view(rewards.shape).split([len(batch["labels"]) for batch in batches])
    return [_with_own(batch, own) for batch, own in zip(batches, of_batches, strict=True)]


def compare(
    rewards: torch.Tensor, is_given: torch.Tensor, loss: PolicyLoss, task: TaskConfig, *, data_rank: int
) -> torch.Tensor:
    """Compare the rewards of each group, of shape [prompts, rewards]; `is_given` says where there is one. A collective.

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


def _spread_of_batch(own: torch.Tensor, data_rank: int) -> torch.Tensor:
    """Give the standard deviation of the values of all ranks; 0 for a single one, or none. A collective."""
    # By data rank: the ranks of a model replica have the same values.
    found = dict(gather_json([data_rank, own.tolist()]))
    values = torch.tensor([value for own in found.values() for value in own], dtype=torch.float64)
    return values.std() if len(values) > 1 else torch.zeros(())


def _with_own(batch: Batch, compared: torch.Tensor) -> Batch:
    """Give a batch with its advantages; shape [rows], or [rows, tokens] if there are rewards of steps."""
    others = {name: values for name, values in batch.items() if name not in (REWARDS, STEP_ENDS)}
    if STEP_ENDS not in batch:
        return others | {ADVANTAGES: compared[:, 0]}
    at_ends = torch.zeros(batch["labels"].shape).scatter_add(1, batch[STEP_ENDS].clamp(min=0), compared)
    return others | {ADVANTAGES: at_ends.flip(1).cumsum(1).flip(1)}
