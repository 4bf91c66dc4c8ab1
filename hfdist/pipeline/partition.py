"""Where to cut: from the costs of blocks to one contiguous run of blocks for each stage.

The most loaded rank sets the pace of a pipeline, so its load is made as small as possible; among the ways to do that,
the most loaded stage is made as small as possible.

One search serves every placement. It is dynamic programming over the stages: partial cuts that agree in what is still
open (the blocks left and the loads of ranks with stages to come) are one state, of which only the best cut is kept.
With one stage a rank nothing but the number of blocks left is open: the classic linear partition. In a V, stages are
taken in pairs from both ends, so that a rank closes as soon as it is opened. With several stages a rank in a loop the
loads of all ranks stay open, and the general problem contains number partitioning, which is NP-hard: then a layer with
more than `MOST_STATES` states keeps the most even ones. The result is exact if that never happens, and at worst the cut
with the smallest largest stage. The limit on a rank's load starts at the average, the least there is, and widens until
a cut is found, so that few states are alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from hfdist.errors import ConfigError, PartitionError

MOST_STATES = 250
"""Partial cuts that are followed at once."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each part of a model costs, in any common unit (parameters, FLOPs, seconds)."""

    blocks: tuple[float, ...]
    prologue: float
    """What runs before the first block: the embedding."""
    epilogue: float
    """What runs after the last block: final norm, head and loss."""


def partition(costs: Costs, rank_of_stage: tuple[int, ...]) -> tuple[range, ...]:
    """Cut the blocks into one run for each stage, none of them empty.

    Args:
        costs: of the model's parts; the prologue belongs to the first stage, the epilogue to the last.
        rank_of_stage: the pipeline rank that runs each stage.

    Returns:
        The blocks of each stage, in order. Equal arguments give equal cuts, in every process.

    Raises:
        PartitionError: fewer blocks than stages.
    """
    num_stages = len(rank_of_stage)
    _check_enough_blocks(len(costs.blocks), num_stages)
    classic = _Search(costs, tuple(range(num_stages)))
    counts = classic.even_ranks(at_most=sum(costs.blocks) + costs.prologue + costs.epilogue)
    assert counts is not None, "a rank that may carry everything always leaves a cut"
    if len(set(rank_of_stage)) < num_stages:
        search = _Search(costs, rank_of_stage)
        counts = search.even_ranks(at_most=search.largest(counts).rank) or counts
        counts = search.even_stages(search.largest(counts)) or counts
    return _runs(counts)


def explicit(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Cut by the user's own number of blocks for each stage.

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
        return _runs(counts)
    raise ConfigError(
        wrong,
        where="strategy.balance",
        found=f"{list(counts)}: {len(counts)} stages, {sum(counts)} blocks",
        allowed=f"{num_stages} numbers >= 1 with the sum {num_blocks}",
        hint=f"strategy.balance={fits}".replace(" ", "") + ", or leave it out to cut by cost",
    )


def _check_enough_blocks(num_blocks: int, num_stages: int) -> None:
    if num_blocks < num_stages:
        raise PartitionError(
            "the model has fewer blocks than the pipeline has stages",
            where="strategy.pipeline, strategy.stages_per_rank",
            found=f"{num_blocks} blocks for {num_stages} stages",
            allowed=f"at most {num_blocks} stages (strategy.pipeline x strategy.stages_per_rank)",
        )


def _runs(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


class _Cut(NamedTuple):
    """A partial cut; the smaller, the better."""

    worst: float
    """Load of the most loaded rank or stage so far."""
    squares: float
    """Sum of the squared costs of the stages: of two cuts with the same worst, the more even one is kept."""
    counts: tuple[int, ...]
    """Blocks of each stage, in the order of the turns."""


class _State(NamedTuple):
    """What of a partial cut bears on the rest: blocks from `left` to `right` are to be given, ranks carry `loads`."""

    left: int
    right: int
    loads: tuple[float, ...]
    """Of each rank; 0 for a rank whose stages all have their blocks."""


class _ToCome(NamedTuple):
    """What a rank has still to take."""

    rank: int
    num_stages: int
    extra: float


class _Turn(NamedTuple):
    """One stage takes blocks from the left or the right end of those that are left."""

    stage: int
    rank: int
    from_right: bool
    extra: float
    """Cost of the prologue and epilogue, where they are the stage's."""
    to_come: tuple[_ToCome, ...]
    """After this turn, for each rank that has turns left."""


class _Limits(NamedTuple):
    """Loads that no rank and no stage may exceed."""

    rank: float
    stage: float

    def room(self, load: float, to_come: _ToCome) -> float:
        """Cost of the blocks that a rank with this load can still take."""
        return min(self.rank - load, self.stage * to_come.num_stages) - to_come.extra


class _Search:
    """Finds the best numbers of blocks for one placement of stages."""

    def __init__(self, costs: Costs, rank_of_stage: tuple[int, ...]) -> None:
        self._rank_of_stage = rank_of_stage
        self._num_stages = len(rank_of_stage)
        self._num_ranks = max(rank_of_stage) + 1
        self._prefix = tuple(accumulate(costs.blocks, initial=0.0))
        self._extra = [0.0] * self._num_stages
        self._extra[0] += costs.prologue
        self._extra[-1] += costs.epilogue
        self._total = self._prefix[-1] + sum(self._extra)
        self._largest_block = max(costs.blocks)
        self._turns = self._plan_turns()

    def largest(self, counts: Sequence[int]) -> _Limits:
        """Loads of the most loaded rank and of the most loaded stage."""
        stages = [self._prefix[run.stop] - self._prefix[run.start] for run in _runs(counts)]
        stages = [blocks + extra for blocks, extra in zip(stages, self._extra, strict=True)]
        ranks = [0.0] * self._num_ranks
        for rank, cost in zip(self._rank_of_stage, stages, strict=True):
            ranks[rank] += cost
        return _Limits(max(ranks), max(stages))

    def even_ranks(self, *, at_most: float) -> tuple[int, ...] | None:
        """Numbers of blocks for which the most loaded rank has the least to do; None: none found up to the limit."""
        for limit in self._widen(self._total / self._num_ranks, at_most):
            counts = self._best(_Limits(limit, math.inf), by_stage=False)
            if counts is not None:
                return counts
        return None

    def even_stages(self, within: _Limits) -> tuple[int, ...] | None:
        """Numbers of blocks for which the most loaded stage has the least to do; None: none found within the limits."""
        for limit in self._widen(self._total / self._num_stages, within.stage):
            counts = self._best(_Limits(within.rank, limit), by_stage=True)
            if counts is not None:
                return counts
        return None

    def _widen(self, limit: float, at_most: float) -> Iterator[float]:
        step = self._largest_block / 16
        while limit < at_most:
            yield limit
            limit, step = limit + step, 2 * step
        yield at_most

    def _plan_turns(self) -> list[_Turn]:
        order = list(range(self._num_stages))
        if self._rank_of_stage == self._rank_of_stage[::-1]:
            order = [stage for pair in zip(order, reversed(order), strict=True) for stage in pair][: self._num_stages]
        turns = []
        for turn, stage in enumerate(order):
            later = order[turn + 1 :]
            to_come = tuple(
                _ToCome(rank, len(stages), sum(self._extra[s] for s in stages))
                for rank in range(self._num_ranks)
                if (stages := [s for s in later if self._rank_of_stage[s] == rank])
            )
            # A stage further right than one to come takes from the right.
            from_right = any(stage > s for s in later)
            turns.append(_Turn(stage, self._rank_of_stage[stage], from_right, self._extra[stage], to_come))
        return turns

    def _best(self, limits: _Limits, *, by_stage: bool) -> tuple[int, ...] | None:
        # The order of a sum changes its last digit; a load that is just the limit must not fail for that.
        limits = _Limits(limits.rank * (1 + 1e-12), limits.stage * (1 + 1e-12))
        layer = {_State(0, len(self._prefix) - 1, (0.0,) * self._num_ranks): _Cut(0.0, 0.0, ())}
        for turn in self._turns:
            following: dict[_State, _Cut] = {}
            for state, cut in layer.items():
                for count, cost, after in self._choices(state, turn, limits):
                    worst = max(cut.worst, cost if by_stage else state.loads[turn.rank] + cost)
                    longer = _Cut(worst, cut.squares + cost * cost, (*cut.counts, count))
                    if after not in following or longer < following[after]:
                        following[after] = longer
            layer = self._most_even(following, turn, limits)
        if not layer:
            return None
        counts = min(layer.values()).counts
        return tuple(count for _, count in sorted(zip((turn.stage for turn in self._turns), counts, strict=True)))

    def _choices(self, state: _State, turn: _Turn, limits: _Limits) -> Iterator[tuple[int, float, _State]]:
        """Numbers of blocks that the stage may take, what they cost, and the state after."""
        prefix, rank = self._prefix, turn.rank
        before, behind = state.loads[:rank], state.loads[rank + 1 :]
        own = next((other for other in turn.to_come if other.rank == rank), None)
        room_of_others = sum(limits.room(state.loads[o.rank], o) for o in turn.to_come if o is not own)
        most = state.right - state.left - sum(other.num_stages for other in turn.to_come)
        for count in range(1, most + 1) if turn.to_come else (most,):
            left, right = (state.left, state.right - count) if turn.from_right else (state.left + count, state.right)
            rest = prefix[right] - prefix[left]
            cost = prefix[state.right] - prefix[state.left] - rest + turn.extra
            load = state.loads[rank] + cost
            if load > limits.rank or cost > limits.stage:
                return
            if rest <= room_of_others + (limits.room(load, own) if own else 0.0):
                yield count, cost, _State(left, right, (*before, load if own else 0.0, *behind))

    def _most_even(self, layer: dict[_State, _Cut], turn: _Turn, limits: _Limits) -> dict[_State, _Cut]:
        """Keep the states whose room is spread evenly over the stages to come, and is large."""
        if len(layer) <= MOST_STATES:
            return layer
        num_stages = sum(other.num_stages for other in turn.to_come)

        def unevenness(item: tuple[_State, _Cut]) -> tuple[float, _Cut]:
            state, cut = item
            rooms = [limits.room(state.loads[other.rank], other) for other in turn.to_come]
            even = sum(rooms) / num_stages
            spread = sum(
                other.num_stages * (room / other.num_stages - even) ** 2
                for other, room in zip(turn.to_come, rooms, strict=True)
            )
            spare = sum(rooms) - (self._prefix[state.right] - self._prefix[state.left])
            return spread - spare * self._largest_block, cut

        return dict(sorted(layer.items(), key=unevenness)[:MOST_STATES])
