"""Where to cut: from the costs of blocks to one contiguous run of blocks for each stage.

The most loaded rank sets the pace of a pipeline, so its load is made as small as possible; among the ways to do that,
the most loaded stage is made as small as possible.

One search serves every placement. It is dynamic programming over the stages: partial cuts that agree in what is still
open (the blocks that are left, and the loads of ranks with stages to come) are one state, of which only the best cut is
kept. The limit on a load starts at the average, the least there is, and widens until a cut fits, so that few states
are alive.

* With one stage a rank only the number of blocks left is open: the classic linear partition, exact.
* In a V the stages are taken in pairs from both ends, so that a rank closes right after it opens, and states are few.
* With several stages a rank in a loop the loads of all ranks stay open. This contains number partitioning, which is
  NP-hard.

Where a layer has more states than the constants below allow, the most promising ones are followed. The result is exact
if that did not happen, and never worse than the cut with the smallest largest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from hfdist.errors import ConfigError, PartitionError

MOST_STATES_V = 2000
"""Partial cuts that are followed at once in a V, where at most one rank is open."""
MOST_STATES_LOOP = 200
"""The same where the loads of many ranks are open, and more would take long and still not be all."""


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
        counts = search.even_ranks(at_most=search.loads(counts).rank) or counts
        counts = search.even_stages(search.loads(counts)) or counts
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
        where="strategy.blocks_per_stage",
        found=f"{list(counts)}: {len(counts)} stages, {sum(counts)} blocks",
        allowed=f"{num_stages} numbers >= 1 with the sum {num_blocks}",
        hint=f"strategy.blocks_per_stage={fits}".replace(" ", "") + ", or leave it out to cut by cost",
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


class _Loads(NamedTuple):
    """Loads of the most loaded rank and of the most loaded stage, as they are or at most may be."""

    rank: float
    stage: float


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
        self._largest_block = max(costs.blocks)
        # Blocks whose costs are multiples of a unit fill no room that is smaller: so nothing is tried in vain.
        whole = all(float(cost).is_integer() for cost in costs.blocks)
        self._unit = float(math.gcd(*map(int, costs.blocks))) if whole else 0.0
        self._least = self._lower_bound(min(costs.blocks))
        self._from_both_ends = rank_of_stage == rank_of_stage[::-1]
        most_states = MOST_STATES_V if self._from_both_ends else MOST_STATES_LOOP
        # With one stage a rank there is a state for each block, and all are followed.
        self._most_states = max(most_states, len(costs.blocks))
        self._turns = self._plan_turns()

    def loads(self, counts: Sequence[int]) -> _Loads:
        """Loads of the most loaded rank and stage."""
        blocks = (self._prefix[run.stop] - self._prefix[run.start] for run in _runs(counts))
        return self._largest([cost + extra for cost, extra in zip(blocks, self._extra, strict=True)])

    def even_ranks(self, *, at_most: float) -> tuple[int, ...] | None:
        """Numbers of blocks for which the most loaded rank has the least to do; None: none found up to the limit."""
        limits = (_Loads(limit, math.inf) for limit in self._widen(self._least.rank, at_most))
        return self._first(limits, by_stage=False)

    def even_stages(self, within: _Loads) -> tuple[int, ...] | None:
        """Numbers of blocks for which the most loaded stage has the least to do; None: none found within the limits."""
        limits = (_Loads(within.rank, limit) for limit in self._widen(self._least.stage, within.stage))
        return self._first(limits, by_stage=True)

    def _largest(self, stages: Sequence[float]) -> _Loads:
        ranks = [0.0] * self._num_ranks
        for rank, cost in zip(self._rank_of_stage, stages, strict=True):
            ranks[rank] += cost
        return _Loads(max(ranks), max(stages))

    def _lower_bound(self, smallest_block: float) -> _Loads:
        total = self._prefix[-1] + sum(self._extra)
        fewest = self._largest([smallest_block + extra for extra in self._extra])
        return _Loads(max(fewest.rank, total / self._num_ranks), max(fewest.stage, total / self._num_stages))

    def _first(self, limits: Iterable[_Loads], *, by_stage: bool) -> tuple[int, ...] | None:
        found = (self._best(limit, by_stage=by_stage) for limit in limits)
        return next((counts for counts in found if counts is not None), None)

    def _widen(self, limit: float, at_most: float) -> Iterator[float]:
        step = (at_most - limit) / 8
        while limit < at_most:
            yield limit
            limit, step = limit + step, 2 * step
        yield at_most

    def _plan_turns(self) -> list[_Turn]:
        order = list(range(self._num_stages))
        if self._from_both_ends:
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

    def _best(self, limits: _Loads, *, by_stage: bool) -> tuple[int, ...] | None:
        # The order of a sum changes its last digit; a load that is just the limit must not fail for that.
        limits = _Loads(limits.rank * (1 + 1e-12), limits.stage * (1 + 1e-12))
        layer = {_State(0, len(self._prefix) - 1, (0.0,) * self._num_ranks): _Cut(0.0, 0.0, ())}
        for turn in self._turns:
            following: dict[_State, _Cut] = {}
            for state, cut in layer.items():
                for count, cost, after in self._choices(state, turn, limits):
                    worst = max(cut.worst, cost if by_stage else state.loads[turn.rank] + cost)
                    longer = _Cut(worst, cut.squares + cost * cost, (*cut.counts, count))
                    if after not in following or longer < following[after]:
                        following[after] = longer
            layer = self._most_promising(following, turn, limits)
        if not layer:
            return None
        counts = min(layer.values()).counts
        return tuple(count for _, count in sorted(zip((turn.stage for turn in self._turns), counts, strict=True)))

    def _choices(self, state: _State, turn: _Turn, limits: _Loads) -> Iterator[tuple[int, float, _State]]:
        """Numbers of blocks that the stage may take, what they cost, and the state after."""
        prefix, rank = self._prefix, turn.rank
        before, behind = state.loads[:rank], state.loads[rank + 1 :]
        own = next((other for other in turn.to_come if other.rank == rank), None)
        room_of_others = sum(self._room(limits, state.loads[o.rank], o) for o in turn.to_come if o is not own)
        most = state.right - state.left - sum(other.num_stages for other in turn.to_come)
        for count in range(1, most + 1) if turn.to_come else (most,):
            left, right = (state.left, state.right - count) if turn.from_right else (state.left + count, state.right)
            rest = prefix[right] - prefix[left]
            cost = prefix[state.right] - prefix[state.left] - rest + turn.extra
            load = state.loads[rank] + cost
            if load > limits.rank or cost > limits.stage:
                return
            if rest <= room_of_others + (self._room(limits, load, own) if own else 0.0):
                yield count, cost, _State(left, right, (*before, load if own else 0.0, *behind))

    def _room(self, limits: _Loads, load: float, to_come: _ToCome) -> float:
        """Cost of the blocks that a rank with this load can still take."""
        room = min(limits.rank - load, limits.stage * to_come.num_stages) - to_come.extra
        return room - room % self._unit if self._unit else room

    def _most_promising(self, layer: dict[_State, _Cut], turn: _Turn, limits: _Loads) -> dict[_State, _Cut]:
        """Keep the states that leave much room, spread evenly, and whose stages are likely to come out even."""
        if len(layer) <= self._most_states:
            return layer
        num_stages = sum(other.num_stages for other in turn.to_come)
        extra = sum(other.extra for other in turn.to_come)

        def promise(item: tuple[_State, _Cut]) -> tuple[float, _Cut]:
            state, cut = item
            rest = self._prefix[state.right] - self._prefix[state.left]
            rooms = [self._room(limits, state.loads[other.rank], other) for other in turn.to_come]
            room = sum(rooms)
            spread = sum(r * r / other.num_stages for r, other in zip(rooms, turn.to_come, strict=True))
            spread -= room * room / num_stages
            squares = cut.squares + (rest + extra) ** 2 / num_stages
            return spread + squares - self._largest_block * (room - rest), cut

        return dict(sorted(layer.items(), key=promise)[: self._most_states])
