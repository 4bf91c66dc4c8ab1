"""What each rank of a pipeline does in one step, in order: it computes, sends and receives.

The orders of computing are torch's, but for the two that it has no list of. Its own function adds the sends and
receives. It puts each send and its receive at one moment of an order over all ranks, so ranks that keep to their lists
cannot wait for each other in a circle, not even where a send waits for its receive, as on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    # Private: actions as torch's schedules list them, and what adds sends and receives to such lists.
    # tests/unit/pipeline/test_seams.py watches them.
    _Action,
    _add_send_recv,
    _ComputationType,
)

from hfdist.config.pipeline import ONE_F_ONE_B, Schedule


class Operation(Enum):
    """What a rank can do for a stage and a micro batch, by torch's names."""

    forward = "F"
    backward = "B"
    backward_input = "I"
    backward_weight = "W"
    send_output = "SEND_F"
    receive_input = "RECV_F"
    send_input_gradient = "SEND_B"
    receive_output_gradient = "RECV_B"


_COMPUTES = (Operation.forward, Operation.backward, Operation.backward_input, Operation.backward_weight)
_RECEIVES = (Operation.receive_input, Operation.receive_output_gradient)


class Instruction(NamedTuple):
    """One thing to do."""

    operation: Operation
    stage: int
    microbatch: int


def plan(schedule: Schedule, rank_of_stage: tuple[int, ...], num_microbatches: int) -> list[list[Instruction]]:
    """Give the instructions of each rank for one step.

    Args:
        schedule: says in which order ranks compute.
        rank_of_stage: the schedule's own placement: see `hfdist.pipeline.schedule.rank_of_stage`.
        num_microbatches: of one step.

    Raises:
        ValueError: torch's schedule cannot run so many.
    """
    computing = _ORDERS[schedule](rank_of_stage, num_microbatches)
    with_messages = _add_send_recv(
        {rank: _singles(actions) for rank, actions in computing.items()},
        stage_to_rank=rank_of_stage.__getitem__,
        num_stages=len(rank_of_stage),
    )
    return [[_instruction(action) for action in with_messages[rank]] for rank in sorted(with_messages)]


def receive_early(instructions: Sequence[Instruction], num_computations: int) -> list[Instruction]:
    """Begin to receive while computing what comes before, so that senders do not wait for the receiver.

    Only for networks on which a receive that waits holds up nothing else: not for NCCL.

    Args:
        instructions: of one rank. Receives keep their order, which is that of the sends.
        num_computations: how many of them earlier, so how much longer there is room for what is received.
    """
    early: list[Instruction] = []
    for instruction in instructions:
        place = len(early)
        if instruction.operation in _RECEIVES:
            num_passed = 0
            while place > 0 and early[place - 1].operation not in _RECEIVES:
                before = early[place - 1]
                num_passed += before.operation in _COMPUTES
                # A gradient has the shape of an output, so it comes after the forward.
                if num_passed > num_computations or before == (Operation.forward, *instruction[1:]):
                    break
                place -= 1
        early.insert(place, instruction)
    return early


def _singles(actions: list[Any]) -> list[_Action]:
    """Leave out idle time, and take pairs apart, the forward first.

    DualPipeV sends a forward's output only after the backward that it is paired with, so the next rank waits for both.
    With each pair as two actions a step takes 2 to 7 % less (benchmarks/pipeline.py).
    """
    return [single for action in actions if action is not None for single in action.sub_actions or (action,)]


def _instruction(action: _Action) -> Instruction:
    assert action.microbatch_index is not None
    return Instruction(Operation(action.computation_type.value), action.stage_index, action.microbatch_index)


def _gpipe(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[Any]]:
    return {rank: _forwards_ahead(rank, num_microbatches, num_microbatches) for rank in rank_of_stage}


def _one_f_one_b(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[Any]]:
    """A rank keeps no more micro batches in flight than there are ranks from it to the end."""
    num_ranks = len(rank_of_stage)
    return {
        rank: _forwards_ahead(rank, min(num_ranks - rank, num_microbatches), num_microbatches) for rank in rank_of_stage
    }


def _forwards_ahead(stage: int, num_ahead: int, num_microbatches: int) -> list[Any]:
    """First `num_ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    actions = [_Action(stage, _ComputationType.FORWARD, microbatch) for microbatch in range(num_ahead)]
    for microbatch in range(num_microbatches):
        actions.append(_Action(stage, _ComputationType.FULL_BACKWARD, microbatch))
        if microbatch + num_ahead < num_microbatches:
            actions.append(_Action(stage, _ComputationType.FORWARD, microbatch + num_ahead))
    return actions


def _of_torch(kind: Callable[..., Any]) -> Callable[[tuple[int, ...], int], dict[int, list[Any]]]:
    def order(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[Any]]:
        # torch plans for all ranks at once; of stages it wants no more than the places of one rank's.
        places = [
            SimpleNamespace(
                stage_index=stage,
                num_stages=len(rank_of_stage),
                group_size=max(rank_of_stage) + 1,
                group_rank=0,
                submod=nn.Identity(),
            )
            for stage, rank in enumerate(rank_of_stage)
            if rank == 0
        ]
        orders: dict[int, list[Any]] = kind(places, num_microbatches).pipeline_order
        return orders

    return order


_ORDERS = {
    Schedule.gpipe: _gpipe,
    ONE_F_ONE_B: _one_f_one_b,
    Schedule.interleaved_1f1b: _of_torch(ScheduleInterleaved1F1B),
    Schedule.interleaved_zero_bubble: _of_torch(ScheduleInterleavedZeroBubble),
    Schedule.zbv: _of_torch(ScheduleZBVZeroBubble),
    Schedule.dualpipev: _of_torch(ScheduleDualPipeV),
}
