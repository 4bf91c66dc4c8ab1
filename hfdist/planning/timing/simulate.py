"""How long the ranks of a pipeline take for a step, action by action, as their schedule lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from hfdist.config.strategy import Schedule
from hfdist.pipeline.schedule import Instruction, Operation, plan, rank_of_stage

_COMPUTES = (Operation.forward, Operation.backward, Operation.backward_input, Operation.backward_weight)


@lru_cache(maxsize=64)
def _computations(schedule: Schedule, ranks: tuple[int, ...], num_microbatches: int) -> list[list[Instruction]]:
    of_ranks = plan(schedule, ranks, num_microbatches)
    return [[one for one in own if one.operation in _COMPUTES] for own in of_ranks]


def simulate(
    schedule: Schedule,
    seconds: Sequence[tuple[Sequence[float], Sequence[float]]],
    num_microbatches: int,
    message_seconds: float = 0.0,
    *,
    splits_backward: bool = True,
    sender_waits: bool = False,
) -> float:
    """Give the seconds from the first action to the last one of all ranks.

    Args:
        schedule: the schedule of the pipeline.
        seconds: for each rank, the seconds of the forward and of the backward of one micro batch in each of its stages.
        num_microbatches: micro batches of a step.
        message_seconds: seconds of a message from a stage to one on another rank.
        splits_backward: whether gradients of weights are computed apart where the schedule says so; see `Stage`.
        sender_waits: whether a rank can do nothing else while it sends.
    """
    ranks = rank_of_stage(schedule, len(seconds), len(seconds[0][0]))
    own_stages = [[stage for stage, rank in enumerate(ranks) if rank == own] for own in range(len(seconds))]
    forwards = {s: seconds[r][0][i] for r, stages in enumerate(own_stages) for i, s in enumerate(stages)}
    backwards = {s: seconds[r][1][i] for r, stages in enumerate(own_stages) for i, s in enumerate(stages)}
    left = [iter(own) for own in _computations(schedule, ranks, num_microbatches)]
    waiting = [next(own, None) for own in left]
    free = [0.0] * len(seconds)
    done: dict[tuple[bool, int, int], float] = {}
    last = len(ranks) - 1

    while any(one is not None for one in waiting):
        moved = False
        for rank, one in enumerate(waiting):
            while one is not None:
                is_forward = one.operation is Operation.forward
                source = one.stage - 1 if is_forward else one.stage + 1
                begin = free[rank]
                if one.operation is not Operation.backward_weight:
                    if 0 <= source <= last:
                        ready = done.get((is_forward, source, one.microbatch))
                        if ready is None:
                            break
                        begin = max(begin, ready + (message_seconds if ranks[source] != rank else 0.0))
                    free[rank] = begin + _lasts(one, forwards, backwards, splits_backward)
                    done[is_forward, one.stage, one.microbatch] = free[rank]
                    target = one.stage + 1 if is_forward else one.stage - 1
                    if sender_waits and 0 <= target <= last and ranks[target] != rank:
                        free[rank] += message_seconds
                else:
                    free[rank] = begin + _lasts(one, forwards, backwards, splits_backward)
                one, moved = next(left[rank], None), True
            waiting[rank] = one
        if not moved:
            raise ValueError(f"the {schedule.value} schedule waits for itself")
    return max(free)


def _lasts(
    one: Instruction, forwards: Mapping[int, float], backwards: Mapping[int, float], splits_backward: bool
) -> float:
    """Give the seconds of one action, from those of each stage."""
    whole = backwards[one.stage]
    match one.operation:
        case Operation.forward:
            return forwards[one.stage]
        case Operation.backward:
            return whole
    # All of the backward of the first stage can wait: no stage before it needs a gradient.
    share = 1.0 if not splits_backward else 0.0 if one.stage == 0 else 0.5
    return whole * (share if one.operation is Operation.backward_input else 1 - share)
