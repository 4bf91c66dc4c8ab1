"""Which prompts of a step train, if not all do: those whose answers have different rewards (DAPO, arXiv 2503.14476).

    prompts of a step, by number    0     1     2     3     4     5           task.trained_prompts=3
    their answers have rewards      alike differ alike alike differ alike
    trained                         0     1                 4                 then alike ones, if too few differ

A step answers all its prompts, so the data are read as ever: in any layout the same prompts in the same step. Others
leave the batch before a forward is run for the loss, and are in no mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfdist.collectives import gather_json
from hfdist.config.batch import IGNORED
from hfdist.strategies.engine import Batch
from hfdist.topology import Topology
from hfdist.tune.rollout_rows import LEAST_TOKENS, REWARDS, STEP_ENDS, TRAINS, are_answered
from hfdist.tune.step_rewards import differ


def keep_live(batches: Sequence[Batch], num_trained: int, num_answers: int, topology: Topology) -> list[Batch]:
    """Give batches of the prompts of a step that train. A collective.

    Args:
        batches: of this data rank, with REWARDS; each prompt has `num_answers` rows, one after another.
        num_trained: prompts that train, of all data ranks together.
        num_answers: answers to each prompt.
        topology: the place of this rank.

    Returns:
        As many batches, each with at least the rows of one prompt; they have no targets if none of its prompts trains.
    """
    own = [
        [*zip(_are_answered(batch, num_answers).tolist(), differ(batch, num_answers).tolist(), strict=True)]
        for batch in batches
    ]
    # By data rank: the ranks of a model replica say the same.
    of_ranks = dict(gather_json([topology.data_rank, [one for of_batch in own for one in of_batch]]))
    places = [
        (not is_live, place, data_rank)
        for data_rank, found in of_ranks.items()
        for place, (is_answered, is_live) in enumerate(found)
        if is_answered
    ]
    trained = {place for _, place, data_rank in sorted(places)[:num_trained] if data_rank == topology.data_rank}
    kept, first = [], 0
    for batch, of_batch in zip(batches, own, strict=True):
        stays = torch.tensor([place in trained for place in range(first, first + len(of_batch))])
        kept.append(_select(batch, stays.repeat_interleave(num_answers), num_answers))
        first += len(of_batch)
    return kept


def _are_answered(batch: Batch, num_answers: int) -> torch.Tensor:
    """Whether there was a prompt; shape [prompts]."""
    return are_answered(batch).view(-1, num_answers).any(1)


def _select(batch: Batch, stays: torch.Tensor, num_answers: int) -> Batch:
    """Give the rows that stay; if none does, the first rows, cut short and without targets."""
    if stays.any():
        return {name: values[stays] for name, values in batch.items()}
    few = {name: values[:num_answers] for name, values in batch.items()}
    of_tokens = [name for name, values in few.items() if values.ndim > 1 and name not in (REWARDS, STEP_ENDS)]
    few |= {name: few[name][:, :LEAST_TOKENS] for name in of_tokens}
    few |= {name: torch.full_like(few[name], -1) for name in (STEP_ENDS,) if name in few}
    few |= {name: torch.ones_like(few[name]) for name in (TRAINS,) if name in few}
    return few | {"labels": torch.full_like(few["labels"], IGNORED)}
