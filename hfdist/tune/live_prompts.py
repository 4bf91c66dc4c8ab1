"""The prompts of a step that train, if not all do: those whose answers have different rewards (DAPO, arXiv 2503.14476).

    prompts of a step, by number    0     1      2     3     4      5          task.trained_prompts=3
    rewards of their answers        alike differ alike alike differ alike
    trained                         0     1                  4                 1 and 4 differ; 0 fills the number up

A step answers all its prompts, so the data are read as ever: in any layout the same prompts in the same step. Prompts
that do not train leave the batch before a forward is run for the loss, and are in no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from hfdist.collectives import gather_json
from hfdist.config.batch import IGNORED
from hfdist.strategies.engine import Batch
from hfdist.topology import Topology
from hfdist.tune.rollout_rows import LEAST_TOKENS, REWARDS, STEP_ENDS, TRAINS, are_answered
from hfdist.tune.step_rewards import differ


class _Candidate(NamedTuple):
    """An answered prompt of a step. Candidates are sorted by their fields, from the first on: lower ones train."""

    are_alike: bool
    """Whether all its answers have one reward: such a prompt teaches nothing."""
    place: int
    """The prompt's place among those of its data rank."""
    data_rank: int


def keep_live(batches: Sequence[Batch], num_trained: int, num_answers: int, topology: Topology) -> list[Batch]:
    """Give batches of the prompts of a step that train. A collective.

    Args:
        batches: the batches of this data rank, with REWARDS; each prompt has `num_answers` rows, one after another.
        num_trained: number of prompts that train, of all data ranks together.
        num_answers: number of answers to each prompt.
        topology: the place of this rank among all.

    Returns:
        As many batches, each with at least the rows of one prompt; they have no targets if none of its prompts trains.
    """
    candidates, first = [], 0
    for batch in batches:
        candidates += _find_candidates(batch, num_answers, first, topology.data_rank)
        first += len(batch["labels"]) // num_answers
    # By data rank: the ranks of a model replica say the same, which counts once.
    by_data_rank = dict(gather_json([topology.data_rank, candidates]))
    ordered = sorted(_Candidate(*fields) for fields in chain.from_iterable(by_data_rank.values()))
    trained = {one.place for one in ordered[:num_trained] if one.data_rank == topology.data_rank}
    kept, first = [], 0
    for batch in batches:
        num_prompts = len(batch["labels"]) // num_answers
        trains = torch.tensor([place in trained for place in range(first, first + num_prompts)])
        kept.append(_select(batch, trains.repeat_interleave(num_answers), num_answers))
        first += num_prompts
    return kept


def _find_candidates(batch: Batch, num_answers: int, first: int, data_rank: int) -> list[_Candidate]:
    """List the answered prompts of a batch, whose first prompt has the place `first`."""
    are_prompts_answered = are_answered(batch).view(-1, num_answers).any(1).tolist()
    do_differ = differ(batch, num_answers).tolist()
    return [
        _Candidate(not do_differ[number], first + number, data_rank)
        for number, is_answered in enumerate(are_prompts_answered)
        if is_answered
    ]


def _select(batch: Batch, trains: torch.Tensor, num_answers: int) -> Batch:
    """Give the rows that train; if none does, the rows of the first prompt, cut short and without targets."""
    if trains.any():
        return {name: values[trains] for name, values in batch.items()}
    few = {}
    for name, values in batch.items():
        has_tokens = values.ndim > 1 and name not in (REWARDS, STEP_ENDS)
        few[name] = values[:num_answers, :LEAST_TOKENS] if has_tokens else values[:num_answers]
    # So such rows are like those of an empty prompt: no target, no step, and nothing that is kept from training.
    few["labels"] = torch.full_like(few["labels"], IGNORED)
    if STEP_ENDS in few:
        few[STEP_ENDS] = torch.full_like(few[STEP_ENDS], -1)
    if TRAINS in few:
        few[TRAINS] = torch.ones_like(few[TRAINS])
    return few
