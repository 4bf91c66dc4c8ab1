"""What each rank of a pipeline does when, by its schedule.

Two ranks, four micro batches; time runs to the right, and all stages take as long. F is a forward, B a full backward,
I and W are its halves: the gradients of inputs and of weights. The digit is the micro batch; small letters are the
second stage of a rank.

gpipe
    0  F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
    1   . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .
1f1b
    0  F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3
    1   . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .
interleaved_1f1b
    0  F0 F1 f0 f1 F2  . b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1  . b2 b2  . b3 b3 B2 B2 B3 B3
    1   . F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3  .  .
interleaved_zero_bubble
    0  F0 F1 f0 f1  . i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    1   . F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
zbv
    0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3  .
    1   . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
dualpipev
    0  F0 F1 F2 f0 i0 w0 f1 F3 b1 b1 f2 B0 B0 b2 b2 f3  . B1 B1 b3 b3 I2 W2 I3 W3
    1   . F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 b2 b2 B2 B2 i3 I3 w3 W3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from hfdist.config.strategy import ONE_F_ONE_B, Schedule

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


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


FORWARDS = (Operation.forward, Operation.send_output, Operation.receive_input)
"""What is left of a step without gradients."""
_COMPUTES = (Operation.forward, Operation.backward, Operation.backward_input, Operation.backward_weight)
"""What a rank does by itself."""
_RECEIVES = (Operation.receive_input, Operation.receive_output_gradient)
"""What waits for another rank."""


class Instruction(NamedTuple):
    """One operation of a rank, for one of its stages and one micro batch."""

    operation: Operation
    stage: int
    microbatch: int


def list_instructions(
    schedule: Schedule, rank_of_stage: tuple[int, ...], num_microbatches: int
) -> list[list[Instruction]]:
    """Give the instructions of each rank for one step: it computes, sends and receives.

    The orders of computing are torch's, but for the two that it has no list of. Its own function adds the sends and
    receives. It puts each send and its receive at one moment of an order over all ranks, so ranks that keep to their
    lists cannot wait for each other in a circle, not even where a send waits for its receive, as on NCCL. The placement
    must be the schedule's own: see `rank_of_stage`.

    Raises:
        ValueError: torch's schedule cannot run so many.
    """
    computing = _ORDERS[schedule](rank_of_stage, num_microbatches)
    # Any: some actions of torch's have no micro batch, and these all have one.
    with_messages: dict[int, list[Any]] = _torch_schedules()._add_send_recv(
        {rank: _singles(actions) for rank, actions in computing.items()},
        stage_to_rank=rank_of_stage.__getitem__,
        num_stages=len(rank_of_stage),
    )
    return [list(map(_instruction, with_messages[rank])) for rank in sorted(with_messages)]


@lru_cache(maxsize=64)
def computations(
    schedule: Schedule, rank_of_stage: tuple[int, ...], num_microbatches: int
) -> tuple[tuple[Instruction, ...], ...]:
    """Give what each rank computes in one step, in order: without messages, which take time to place."""
    orders = _ORDERS[schedule](rank_of_stage, num_microbatches)
    return tuple(tuple(map(_instruction, _singles(orders[rank]))) for rank in sorted(orders))


def _instruction(action: Any) -> Instruction:
    return Instruction(Operation(action.computation_type.value), action.stage_index, action.microbatch_index)


def receive_early(instructions: Sequence[Instruction], num_computations: int) -> list[Instruction]:
    """Move receives to an earlier place in a rank's list, so that senders do not wait for the receiver.

    Only for networks on which a receive that waits holds up nothing else: not for NCCL.

    Args:
        instructions: of one rank. Receives keep their order, which is that of the sends.
        num_computations: how many computations earlier a receive begins. What is received takes memory from there on.
    """
    # num_computations=1     F0 F1 RECV_B0 B0 F2 RECV_B1 B1
    #                  ->    F0 RECV_B0 F1 B0 RECV_B1 F2 B1     while F1 runs, the gradient of 0 comes in
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


def _torch_schedules() -> ModuleType:
    """Import torch's module when a list of actions is asked for: it takes time that other layouts save.

    Private in it: actions as torch's schedules list them, and what adds sends and receives to such lists.
    """
    from torch.distributed.pipelining import schedules

    return schedules


def _singles(actions: Iterable[_Action | None]) -> list[_Action]:
    """Leave out idle time, and take pairs apart, the forward first.

    DualPipeV sends a forward's output only after the backward that it is paired with, so the next rank waits for both.
    With each pair as two actions a step takes 2 to 7 % less (benchmarks/pipeline.py).
    """
    return [single for action in actions if action is not None for single in action.sub_actions or (action,)]


def _gpipe(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[_Action]]:
    return {rank: _forwards_ahead(rank, num_microbatches, num_microbatches) for rank in rank_of_stage}


def _one_f_one_b(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[_Action]]:
    num_ranks = len(rank_of_stage)
    # A rank keeps no more micro batches in flight than there are ranks from it to the end.
    return {
        rank: _forwards_ahead(rank, min(num_ranks - rank, num_microbatches), num_microbatches) for rank in rank_of_stage
    }


def _forwards_ahead(stage: int, num_ahead: int, num_microbatches: int) -> list[_Action]:
    """List `num_ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    torch_schedules = _torch_schedules()
    action, kinds = torch_schedules._Action, torch_schedules._ComputationType
    actions = [action(stage, kinds.FORWARD, microbatch) for microbatch in range(num_ahead)]
    for microbatch in range(num_microbatches):
        actions.append(action(stage, kinds.FULL_BACKWARD, microbatch))
        if microbatch + num_ahead < num_microbatches:
            actions.append(action(stage, kinds.FORWARD, microbatch + num_ahead))
    return actions


def _of_torch(class_name: str) -> Callable[[tuple[int, ...], int], dict[int, list[_Action]]]:
    """Give a function that makes the order of computing of each rank as a schedule class of torch does."""

    def order(rank_of_stage: tuple[int, ...], num_microbatches: int) -> dict[int, list[_Action]]:
        # A schedule of torch orders all ranks, but it is made of the stages of one: these have no model here.
        stages_of_first_rank = [
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
        schedule = getattr(_torch_schedules(), class_name)(stages_of_first_rank, num_microbatches)
        orders: dict[int, list[_Action]] = schedule.pipeline_order
        return orders

    return order


_ORDERS = {
    Schedule.gpipe: _gpipe,
    ONE_F_ONE_B: _one_f_one_b,
    Schedule.interleaved_1f1b: _of_torch("ScheduleInterleaved1F1B"),
    Schedule.interleaved_zero_bubble: _of_torch("ScheduleInterleavedZeroBubble"),
    Schedule.zbv: _of_torch("ScheduleZBVZeroBubble"),
    Schedule.dualpipev: _of_torch("ScheduleDualPipeV"),
    Schedule.auto: _one_f_one_b,
}
"""By schedule: a function of the rank of each stage and the number of micro batches that gives each rank's order."""
