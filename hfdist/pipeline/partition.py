"""Which blocks each stage runs: runs of blocks whose costs are shared evenly, or the user's own numbers.

The cost of a part of a model is its parameters, its FLOPs or measured seconds. The most loaded rank sets the pace of a
pipeline, so its load is made as small as possible. With one stage a rank this is the linear partition problem, which
dynamic programming solves exactly. With several stages a rank it contains number partitioning, which is NP-hard: the
stages are first made even, and then blocks move from stage to stage for as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Balance, StrategyConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, PartitionError
from hfdist.pipeline.block_times import BlockTimes, time_blocks_of_run
from hfdist.pipeline.costs import Costs, costs_by_flops, costs_by_parameters
from hfdist.pipeline.stage_module import Block

_RESOLUTION = 2**29
"""Costs become integers with about this sum: sums are exact, so all processes find the same, and squares fit int64."""

_Ints = npt.NDArray[np.int64]


class _Bounds(NamedTuple):
    """The first block of each stage, and the end, with what is to be small."""

    loads: tuple[int, ...]
    """The largest load of a rank, and the sum of squares of all; then the same of stages."""
    bounds: tuple[int, ...]


def choose_stages(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    strategy: StrategyConfig,
    batch: BatchPlan,
    rank_of_stage: tuple[int, ...],
    precision: Precision,
    times: BlockTimes | None = None,
) -> tuple[range, ...]:
    """Give the blocks of each stage, as `strategy.balance` and `strategy.blocks_per_stage` ask; equal on all ranks.

    `times`: of the blocks, where they are known.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: `strategy.blocks_per_stage` does not fit the model.
    """
    if strategy.blocks_per_stage is not None:
        return take_counts(strategy.blocks_per_stage, len(blocks), len(rank_of_stage))
    match strategy.balance:
        case Balance.parameters:
            costs = costs_by_parameters(model, blocks)
        case Balance.flops:
            costs = costs_by_flops(model, blocks, batch.sequence_length)
        case Balance.measured:
            if times is None:
                times = time_blocks_of_run(model, blocks, (batch.micro_batch_size, batch.sequence_length), precision)
            costs = Costs(
                blocks=tuple(block.seconds for block in times.blocks),
                prologue=times.prologue.seconds,
                epilogue=times.epilogue.seconds,
            )
    return partition(costs, rank_of_stage)


def partition(costs: Costs, rank_of_stage: tuple[int, ...]) -> tuple[range, ...]:
    """Give one run of blocks for each stage, none of them empty. Equal arguments give equal runs in every process.

    The prologue belongs to the first stage, the epilogue to the last.

    Raises:
        PartitionError: fewer blocks than stages.
    """
    num_stages = len(rank_of_stage)
    _check_enough_blocks(len(costs.blocks), num_stages)
    unit = (sum(costs.blocks) + costs.prologue + costs.epilogue) / _RESOLUTION or 1.0
    prefix = list(accumulate((round(cost / unit) for cost in costs.blocks), initial=0))
    extra = [0] * num_stages
    extra[0] += round(costs.prologue / unit)
    extra[-1] += round(costs.epilogue / unit)
    bounds = _even_stages(prefix, extra)
    if len(set(rank_of_stage)) < num_stages:
        bounds = _even_ranks(np.array(bounds), np.array(prefix), np.array(extra), rank_of_stage)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def take_counts(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Take the user's own number of blocks for each stage.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: the wrong number of stages, an empty one, or not all blocks.
    """
    _check_enough_blocks(num_blocks, num_stages)
    fits = [num_blocks // num_stages + (stage < num_blocks % num_stages) for stage in range(num_stages)]
    if len(counts) != num_stages:
        wrong = f"one number of blocks is needed for each of the {num_stages} stages"
    elif min(counts) < 1:
        wrong = "every stage needs a block at least"
    elif sum(counts) != num_blocks:
        wrong = f"the stages together must hold the {num_blocks} blocks of the model"
    else:
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))
    raise ConfigError(
        wrong,
        where="strategy.blocks_per_stage",
        found=f"{list(counts)}: {len(counts)} stages, {sum(counts)} blocks",
        allowed=f"{num_stages} numbers >= 1 with the sum {num_blocks}",
        hint=f"strategy.blocks_per_stage={fits}".replace(" ", "") + ", or leave it out to split by cost",
    )


def _check_enough_blocks(num_blocks: int, num_stages: int) -> None:
    if num_blocks < num_stages:
        # One that the ranks divide by.
        fits = next(number for number in range(num_blocks, 0, -1) if num_stages % number == 0)
        raise PartitionError(
            "the model has fewer blocks than the pipeline has stages",
            where="strategy.pipeline, strategy.stages_per_rank",
            found=f"{num_blocks} blocks for {num_stages} stages",
            allowed=f"at most {num_blocks} stages (strategy.pipeline x strategy.stages_per_rank)",
            hint=f"strategy.pipeline={fits} strategy.stages_per_rank=1 strategy.schedule=1f1b, or a deeper model",
        )


def _even_stages(prefix: Sequence[int], extra: Sequence[int]) -> tuple[int, ...]:
    """Give the first block of each stage, and the end, so that the most loaded stage is as small as possible."""
    num_blocks, num_stages = len(prefix) - 1, len(extra)
    # By first block: largest stage, sum of squares (of equally good ones the more even) and bounds of the later stages.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {num_blocks: (0, 0, (num_blocks,))}
    for stage in reversed(range(num_stages)):
        longer = {}
        for start in range(stage, num_blocks - (num_stages - stage) + 1):
            found = None
            for stop in range(start + 1, num_blocks + 1):
                cost = prefix[stop] - prefix[start] + extra[stage]
                if found is not None and cost > found[0]:
                    break
                if stop in best:
                    largest, squares, bounds = best[stop]
                    option = (max(largest, cost), squares + cost * cost, (start, *bounds))
                    found = option if found is None else min(found, option)
            if found is not None:
                longer[start] = found
        best = longer
    return best[0][2]


def _even_ranks(bounds: _Ints, prefix: _Ints, extra: _Ints, rank_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    """Improve bounds for as long as moving a block from one stage to another, and shifting one bound more, helps."""
    num_stages = len(rank_of_stage)
    runs_on = np.eye(max(rank_of_stage) + 1, dtype=np.int64)[list(rank_of_stage)]
    # A move by the bounds i to j - 1: stage i - 1 gets a block, stage j - 1 loses one, those between keep their number.
    #
    #   bounds 0 2 4 6 8     a b | c d | e f | g h
    #   i = 1, j = 3         a b c | d e | f | g h
    bound = np.arange(num_stages + 1)
    pairs = [(i, j) for i in range(1, num_stages) for j in range(i + 1, num_stages + 1)]
    ranges = np.array([(bound >= i) & (bound < j) for i, j in pairs], dtype=np.int64)
    moves = np.concatenate([ranges, -ranges])
    one = np.eye(num_stages + 1, dtype=np.int64)[1:-1]
    shifts = np.concatenate([0 * one[:1], one, -one])

    def find_best(options: _Ints) -> _Bounds | None:
        """Give the best of several bounds; None: in each of them a stage is empty."""
        options = options[(np.diff(options) > 0).all(axis=1)]
        if not len(options):
            return None
        stages = np.diff(prefix[options]) + extra
        ranks = stages @ runs_on
        keys = (ranks.max(1), (ranks**2).sum(1), stages.max(1), (stages**2).sum(1))
        first = np.lexsort(keys[::-1])[0]
        return _Bounds(tuple(int(key[first]) for key in keys), tuple(options[first].tolist()))

    best = find_best(bounds[None])
    assert best is not None  # no stage is empty to begin with
    while True:
        found = best
        for shift in shifts:
            moved = find_best(np.array(best.bounds) + shift + moves)
            found = found if moved is None else min(found, moved)
        if found.loads == best.loads:
            return best.bounds
        best = found
