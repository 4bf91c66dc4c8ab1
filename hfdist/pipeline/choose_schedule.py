"""`strategy.schedule=auto`: the schedule whose step is the shortest, simulated with the measured times of blocks.

A schedule that splits backwards in two halves idles less, but both halves take longer than a whole backward, most of
all in a narrow model. Which schedule wins depends on the model, the device and the number of micro batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.pipeline.block_times import BlockTimes, PartTime
from hfdist.pipeline.costs import Costs
from hfdist.pipeline.instructions import Instruction, Operation, computations
from hfdist.pipeline.schedule import rank_of_stage, runs_microbatches
from hfdist.pipeline.simulate import StageSeconds, simulate

logger = logging.getLogger(__name__)

_CANDIDATES = (
    (ONE_F_ONE_B, 1),
    (Schedule.gpipe, 1),
    (Schedule.interleaved_1f1b, 2),
    (Schedule.interleaved_zero_bubble, 1),
    (Schedule.interleaved_zero_bubble, 2),
    (Schedule.dualpipev, 2),
    (Schedule.zbv, 2),
)
"""Schedules and their stages a rank: those first that send less and split fewer backwards."""
_WORTH = 0.98
"""A schedule is taken in place of one before it if it takes at most this share of its time: less is noise."""
_USABLE = 0.9
"""Share of the memory that is counted on: what blocks are timed with is not all that a step takes."""

_MOST_SIMULATED = 4
"""Micro batches for each rank up to which all of a step is simulated: beyond, each takes what the one before it did.

Schedules fill the pipeline with fewer. Lists of hundreds of micro batches for tens of ranks take minutes to make.
"""

Stages = tuple[range, ...]
"""The blocks of each stage."""


class Choice(NamedTuple):
    """A schedule, with the blocks of its stages."""

    schedule: Schedule
    stages_per_rank: int
    stages: Stages
    seconds: float
    """Seconds of a step without messages and the optimizer."""
    most_bytes: float
    """Bytes of the state and the activations of the rank that holds most."""

    def describe(self) -> str:
        """Describe it for people."""
        per_rank = f" of {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return f"{self.schedule.value}{per_rank} {self.seconds:.3g} s"


def choose_schedule(
    times: BlockTimes,
    parameters: Costs,
    assign_blocks: Callable[[tuple[int, ...]], Stages],
    *,
    num_ranks: int,
    num_microbatches: int,
    usable_bytes: float,
    state_bytes: float,
    splits_backward: bool,
) -> Choice:
    """Choose, with equal arguments alike on all ranks.

    Args:
        times: of the model's parts.
        parameters: their numbers of parameters.
        assign_blocks: gives the blocks of each stage for the ranks of the stages; PartitionError: too few blocks.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro batches of a step.
        usable_bytes: memory of a rank; where no schedule fits in it, the one that needs least is taken.
        state_bytes: of a parameter of a stage on one rank: its share of itself, its gradient and the optimizer's state.
        splits_backward: whether the run splits backwards where a schedule says so; see `Stage`.
    """
    found: list[Choice] = []
    for schedule, per_rank in _CANDIDATES:
        ranks = rank_of_stage(schedule, num_ranks, per_rank)
        has_blocks = per_rank == 1 or len(ranks) <= len(times.blocks)
        if not has_blocks or not runs_microbatches(schedule, num_ranks, per_rank, num_microbatches):
            continue
        stages = assign_blocks(ranks)
        parts = [times.of_blocks(run) for run in stages]
        held = [state_bytes * parameters.of_blocks(run) for run in stages]
        step = partial(simulate, schedule, _by_rank(parts, ranks, num_ranks), splits_backward=splits_backward)
        memory = partial(_most_held, schedule, ranks, held, [part.kept_bytes for part in parts])
        seconds, most_bytes = (_of_step(figure, num_ranks, num_microbatches) for figure in (step, memory))
        found.append(Choice(schedule, per_rank, stages, seconds, most_bytes))
    # The cache holds the lists of all schedules that were simulated.
    computations.cache_clear()
    most = max(_USABLE * usable_bytes, min(choice.most_bytes for choice in found))
    best = _shortest([choice for choice in found if choice.most_bytes <= most])
    logger.info(
        "strategy.schedule=auto takes %s: a step takes, by the measured times of blocks, %s",
        best.schedule.value,
        ", ".join(choice.describe() + ("" if choice.most_bytes <= most else " but more memory") for choice in found),
    )
    return best


def _by_rank(parts: Sequence[PartTime], ranks: Sequence[int], num_ranks: int) -> list[list[StageSeconds]]:
    """Give the seconds of each rank's stages."""
    seconds: list[list[StageSeconds]] = [[] for _ in range(num_ranks)]
    for rank, part in zip(ranks, parts, strict=True):
        seconds[rank].append(StageSeconds(part.forward, part.backward, part.input_half, part.weight_half))
    return seconds


def _shortest(choices: Sequence[Choice]) -> Choice:
    """Give the choice with the shortest step; an earlier one, if it is hardly longer."""
    best = choices[0]
    for choice in choices[1:]:
        best = choice if choice.seconds <= _WORTH * best.seconds else best
    return best


def _of_step(figure: Callable[[int], float], num_ranks: int, num_microbatches: int) -> float:
    """Give a figure, which depends on the number of micro batches; of a long step by what more of them add to it."""
    if num_microbatches <= _MOST_SIMULATED * num_ranks:
        return figure(num_microbatches)
    less, more = figure((_MOST_SIMULATED - 1) * num_ranks), figure(_MOST_SIMULATED * num_ranks)
    return more + (more - less) * (num_microbatches / num_ranks - _MOST_SIMULATED)


def _most_held(
    schedule: Schedule,
    rank_of_stage: tuple[int, ...],
    state: Sequence[float],
    kept: Sequence[float],
    num_microbatches: int,
) -> float:
    """Give the most bytes that a rank holds at a time: of each stage its state, and what micro batches keep."""
    return max(_held(own, state, kept) for own in computations(schedule, rank_of_stage, num_microbatches))


def _held(instructions: Sequence[Instruction], state: Sequence[float], kept: Sequence[float]) -> float:
    held = most = sum(state[stage] for stage in {one.stage for one in instructions})
    for one in instructions:
        if one.operation is Operation.forward:
            held += kept[one.stage]
            most = max(most, held)
        elif one.operation in (Operation.backward, Operation.backward_weight):
            held -= kept[one.stage]
    return most
