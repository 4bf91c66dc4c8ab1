"""How long the ranks of a pipeline take for a step, action by action, as their schedule lists them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hfdist.config.strategy import Schedule
from hfdist.pipeline.instructions import Operation, computations
from hfdist.pipeline.schedule import rank_of_stage


class StageSeconds(NamedTuple):
    """Seconds of one stage for one micro batch."""

    forward: float
    backward: float
    input_half: float
    """Seconds of a backward in two halves: of the gradients of inputs, and of those of weights."""
    weight_half: float

    def of(self, operation: Operation, *, is_first: bool, splits_backward: bool) -> float:
        """Give the seconds of what a rank computes."""
        match operation:
            case Operation.forward:
                return self.forward
            case Operation.backward:
                return self.backward
            case Operation.backward_input if splits_backward:
                # All of the backward of the first stage can wait: no stage before it needs a gradient.
                return 0.0 if is_first else self.input_half
            case Operation.backward_input:
                return self.backward
        if not splits_backward:
            return 0.0
        return self.backward if is_first else self.weight_half


def simulate(
    schedule: Schedule,
    seconds: Sequence[Sequence[StageSeconds]],
    num_microbatches: int,
    message_seconds: float = 0.0,
    *,
    splits_backward: bool = True,
    sender_waits: bool = False,
) -> float:
    """Give the seconds from the first action to the last one of all ranks.

    Args:
        schedule: the schedule of the pipeline.
        seconds: for each rank, those of each of its stages.
        num_microbatches: micro batches of a step.
        message_seconds: seconds of a message from a stage to one on another rank.
        splits_backward: whether gradients of weights are computed apart where the schedule says so; see `Stage`.
        sender_waits: whether a rank can do nothing else while it sends.
    """
    ranks = rank_of_stage(schedule, len(seconds), len(seconds[0]))
    stages_of_rank = [iter(stages) for stages in seconds]
    of_stage = [next(stages_of_rank[rank]) for rank in ranks]
    left = [deque(instructions) for instructions in computations(schedule, ranks, num_microbatches)]
    free = [0.0] * len(seconds)
    done: dict[tuple[bool, int, int], float] = {}
    last = len(ranks) - 1

    while num_left := sum(map(len, left)):
        for rank, instructions in enumerate(left):
            while instructions:
                operation, stage, microbatch = instructions[0]
                is_forward, passes_on = operation is Operation.forward, operation is not Operation.backward_weight
                source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
                begin = free[rank]
                if passes_on and 0 <= source <= last:
                    ready = done.get((is_forward, source, microbatch))
                    if ready is None:
                        break
                    begin = max(begin, ready + (message_seconds if ranks[source] != rank else 0.0))
                instructions.popleft()
                lasts = of_stage[stage].of(operation, is_first=stage == 0, splits_backward=splits_backward)
                free[rank] = begin + lasts
                if passes_on:
                    done[is_forward, stage, microbatch] = free[rank]
                    if sender_waits and 0 <= target <= last and ranks[target] != rank:
                        free[rank] += message_seconds
        if sum(map(len, left)) == num_left:
            raise ValueError(f"the {schedule.value} schedule waits for itself")
    return max(free)
