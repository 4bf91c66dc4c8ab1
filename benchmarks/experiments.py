"""Two changes to torch's pipeline runtime that bring a step nearer to its bound, as contenders of their own.

*Flattened*: DualPipeV pairs a forward with a backward and sends the forward's output only after both. Run as two
actions, the output leaves a whole backward earlier. DualPipeV then is the best order of all: it splits few backwards,
so it has the fewest actions to pay for.

*Lean*: a plain loop over the same actions, messages included, in the same order. The runtime's checks, profiler
ranges, wrappers of sends and receives, and shape bookkeeping cost half a millisecond an action; here they are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action

from benchmarks.contenders import Contender, Step, TorchPipeline, Work, squared_error
from benchmarks.emulated import HIDDEN_SIZE, Leg


def flatten(orders: dict[int, list[_Action | None]]) -> dict[int, list[_Action]]:
    """The same computations with idle slots left out and overlapped pairs as two actions, the forward first."""
    return {
        rank: [single for action in actions if action is not None for single in action.sub_actions or (action,)]
        for rank, actions in orders.items()
    }


def plan_flattened(schedule: str, work: Work, log: list[Leg]) -> TorchPipeline:
    """A pipeline of torch whose order is flattened."""
    pipeline = TorchPipeline(schedule, 2, work, log)
    pipeline.runner._prepare_schedule_with_comms(flatten(pipeline.runner.pipeline_order))
    return pipeline


def build_flattened(schedule: str, work: Work, log: list[Leg]) -> Step:
    """torch's runtime with a flattened order."""
    return plan_flattened(schedule, work, log).step


def build_lean(schedule: str, posts_early: bool, work: Work, log: list[Leg]) -> Step:
    """A plain loop over a flattened order."""
    return LeanPipeline(plan_flattened(schedule, work, log), posts_early).step


class LeanPipeline:
    """Runs the actions that torch planned for this rank, over the same stages."""

    def __init__(self, planned: TorchPipeline, posts_early: bool) -> None:
        rank = dist.get_rank()
        self._group: Any = dist.distributed_c10d._get_default_group()
        self._stages = planned.modules
        self._rank_of: dict[int, int] = planned.runner.stage_index_to_group_rank
        self._optimizer = planned.optimizer
        methods: dict[str, Callable[..., None]] = {
            "F": self._forward,
            "B": partial(self._backward, split=False),
            "I": partial(self._backward, split=True),
            "W": self._weight_gradient,
            "SEND_F": partial(self._send, change=1),
            "SEND_B": partial(self._send, change=-1),
            "RECV_F": partial(self._receive, change=1),
            "RECV_B": partial(self._receive, change=-1),
        }
        actions = planned.runner.pipeline_order_with_comms[rank]
        if posts_early:
            # A stable sort: receives from one rank stay in the order in which that rank sends.
            actions = sorted(actions, key=lambda action: not action.computation_type.value.startswith("RECV"))
        self._calls = [
            partial(methods[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in actions
            if action.computation_type.value in methods
        ]
        self._last = len(self._rank_of) - 1
        # What a stage takes is found by (stage, micro batch, 1 for an activation or -1 for a gradient).
        self._ready: dict[tuple[int, int, int], Tensor] = {}
        self._arriving: dict[tuple[int, int, int], tuple[Tensor, Any]] = {}
        self._sent: list[tuple[Tensor, Any]] = []
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._pending: dict[tuple[int, int], Any] = {}

    def step(self) -> None:
        """One optimizer step."""
        for call in self._calls:
            call()
        for _, message in self._sent:
            message.wait()
        self._sent.clear()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _forward(self, stage: int, microbatch: int) -> None:
        received = torch.ones(1, HIDDEN_SIZE) if stage == 0 else self._take(stage, microbatch, 1).requires_grad_()
        output = self._stages[stage](received)
        if stage == self._last:
            output = squared_error(output, torch.zeros(1, HIDDEN_SIZE))
        else:
            self._ready[stage + 1, microbatch, 1] = output.detach()
        self._graphs[stage, microbatch] = (received, output)

    def _backward(self, stage: int, microbatch: int, split: bool) -> None:
        received, output = self._graphs.pop((stage, microbatch))
        gradient = None if stage == self._last else self._take(stage, microbatch, -1)
        if split and stage > 0:
            gradients = None if gradient is None else [gradient]
            weights = self._stages[stage].parameters()
            _, self._pending[stage, microbatch] = stage_backward_input([output], gradients, [received], weights)
        elif split:
            # Nobody waits for the first stage's input gradient: all of its backward can wait.
            self._pending[stage, microbatch] = (output, gradient)
        else:
            torch.autograd.backward(output, gradient)
        if stage > 0:
            assert received.grad is not None
            self._ready[stage - 1, microbatch, -1] = received.grad

    def _weight_gradient(self, stage: int, microbatch: int) -> None:
        pending = self._pending.pop((stage, microbatch))
        if stage > 0:
            stage_backward_weight(self._stages[stage].parameters(), pending)
        else:
            torch.autograd.backward(*pending)

    def _send(self, stage: int, microbatch: int, change: int) -> None:
        tensor = self._ready.pop((stage + change, microbatch, change))
        self._sent.append((tensor, self._group.send([tensor], self._rank_of[stage + change], 0)))

    def _receive(self, stage: int, microbatch: int, change: int) -> None:
        buffer = torch.empty(1, HIDDEN_SIZE)
        message = self._group.recv([buffer], self._rank_of[stage - change], 0)
        self._arriving[stage, microbatch, change] = (buffer, message)

    def _take(self, stage: int, microbatch: int, change: int) -> Tensor:
        """An activation or a gradient, from this rank or after it has arrived."""
        key = (stage, microbatch, change)
        if key in self._ready:
            return self._ready.pop(key)
        buffer, message = self._arriving.pop(key)
        message.wait()
        return buffer


EXPERIMENTS = (
    Contender("torch, flattened", "DualPipeV", 2, True, partial(build_flattened, "DualPipeV")),
    Contender("lean loop", "ZBVZeroBubble", 2, True, partial(build_lean, "ZBVZeroBubble", False)),
    Contender("lean loop", "DualPipeV", 2, True, partial(build_lean, "DualPipeV", False)),
    Contender("lean loop, early receives", "DualPipeV", 2, True, partial(build_lean, "DualPipeV", True)),
)
