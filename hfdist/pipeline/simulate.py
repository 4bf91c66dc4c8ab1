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
    """Seconds of the half of a backward that gives the gradients of inputs."""
    weight_half: float
    """Seconds of the half that gives the gradients of weights."""

    def of(self, operation: Operation, *, is_first: bool, splits_backward: bool) -> float:
        """Give the seconds of an operation, which must be one that computes."""
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
    """Give the seconds from the start of the first action of any rank to the end of the last one.

    Args:
        schedule: the schedule of the pipeline.
        seconds: for each rank, those of each of its stages.
        num_microbatches: micro batches of a step.
        message_seconds: seconds of a message from a stage to one on another rank.
        splits_backward: whether a backward runs in two halves where the schedule says so; otherwise it runs whole.
        sender_waits: whether a rank can do nothing else while it sends.
    """
    ranks = rank_of_stage(schedule, len(seconds), len(seconds[0]))
    stages_of_rank = [iter(stages) for stages in seconds]
    seconds_of_stage = [next(stages_of_rank[rank]) for rank in ranks]
    left = [deque(instructions) for instructions in computations(schedule, ranks, num_microbatches)]
    free_at = [0.0] * len(seconds)
    done_at: dict[tuple[bool, int, int], float] = {}
    """By forward or backward, stage and micro batch: when what other stages wait for was there."""
    last = len(ranks) - 1

    def is_elsewhere(stage: int, rank: int) -> bool:
        return 0 <= stage <= last and ranks[stage] != rank

    # In turns, each rank goes on until it needs what is not there yet.
    while num_left := sum(map(len, left)):
        for rank, instructions in enumerate(left):
            while instructions:
                operation, stage, microbatch = instructions[0]
                is_forward = operation is Operation.forward
                source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
                # Gradients of weights wait for nothing but their own rank, and nothing waits for them.
                has_messages = operation is not Operation.backward_weight
                begin = free_at[rank]
                if has_messages and 0 <= source <= last:
                    ready = done_at.get((is_forward, source, microbatch))
                    if ready is None:
                        break
                    begin = max(begin, ready + message_seconds * is_elsewhere(source, rank))
                instructions.popleft()
                of_stage = seconds_of_stage[stage]
                free_at[rank] = begin + of_stage.of(operation, is_first=stage == 0, splits_backward=splits_backward)
                if has_messages:
                    done_at[is_forward, stage, microbatch] = free_at[rank]
                    if sender_waits and is_elsewhere(target, rank):
                        free_at[rank] += message_seconds
        if sum(map(len, left)) == num_left:
            raise ValueError(f"the {schedule.value} schedule waits for itself")
    return max(free_at)
