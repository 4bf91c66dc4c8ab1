"""Runs one rank's instructions: its stages compute, and what they give goes to the stages that take it.

torch has an executor of its own; on each action it spends 0.3 to 0.6 ms of the main thread, on profiler ranges,
wrappers and checks, which on the critical path makes steps 3 to 10 % longer than this loop does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hfdist.pipeline.actions import Instruction, Operation
from hfdist.pipeline.p2p import P2PChannel
from hfdist.pipeline.stage import Stage, Tensors
from hfdist.pipeline.timeline import Action, Recorder


class _Message(NamedTuple):
    """What one stage takes for one micro batch: inputs, or gradients of its outputs."""

    tensors: Tensors
    arriving: Sequence[dist.Work] = ()
    """What to wait for before the tensors can be read."""


_Box = dict[tuple[int, int], _Message]
"""Messages by the stage that takes them, and by micro batch."""


class Runtime:
    """One step of one rank.

    Args:
        stages: this rank's, by index.
        link: the ranks of the pipeline.
        recorder: takes the times of sends, and of waiting to receive.
    """

    def __init__(self, stages: Mapping[int, Stage], link: P2PChannel, recorder: Recorder) -> None:
        self._stages = stages
        self._link = link
        self._recorder = recorder
        self._inputs: _Box = {}
        self._gradients: _Box = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._sending: deque[dist.Work] = deque()

    def run(self, instructions: Sequence[Instruction]) -> list[torch.Tensor]:
        """Do as told; give the losses in order of micro batches if the last stage is here, else an empty list."""
        methods = {
            Operation.forward: self._forward,
            Operation.backward: self._backward,
            Operation.backward_input: self._backward_input,
            Operation.backward_weight: self._backward_weight,
            Operation.send_output: self._send_output,
            Operation.receive_input: self._receive_input,
            Operation.send_input_gradient: self._send_input_gradient,
            Operation.receive_output_gradient: self._receive_output_gradient,
        }
        for operation, stage, microbatch in instructions:
            methods[operation](stage, microbatch)
        for work in self._sending:
            work.wait()
        return [self._losses[microbatch] for microbatch in sorted(self._losses)]

    def _forward(self, index: int, microbatch: int) -> None:
        stage = self._stages[index]
        outputs = stage.forward(microbatch, () if stage.is_first else self._take(self._inputs, index, microbatch))
        if stage.is_last:
            (self._losses[microbatch],) = outputs
        else:
            self._inputs[index + 1, microbatch] = _Message(outputs)

    def _backward(self, index: int, microbatch: int) -> None:
        self._pass_back(self._stages[index].backward, index, microbatch)

    def _backward_input(self, index: int, microbatch: int) -> None:
        self._pass_back(self._stages[index].backward_input, index, microbatch)

    def _pass_back(self, backward: Callable[[int, Tensors], Tensors], index: int, microbatch: int) -> None:
        stage = self._stages[index]
        gradients = backward(microbatch, () if stage.is_last else self._take(self._gradients, index, microbatch))
        if not stage.is_first:
            self._gradients[index - 1, microbatch] = _Message(gradients)

    def _backward_weight(self, index: int, microbatch: int) -> None:
        self._stages[index].backward_weight(microbatch)

    def _send_output(self, index: int, microbatch: int) -> None:
        self._send(self._inputs, index, index + 1, microbatch)

    def _send_input_gradient(self, index: int, microbatch: int) -> None:
        self._send(self._gradients, index, index - 1, microbatch)

    def _receive_input(self, index: int, microbatch: int) -> None:
        room = self._stages[index].empty_inputs(microbatch, self._link.device)
        self._inputs[index, microbatch] = self._receive(room, index - 1)

    def _receive_output_gradient(self, index: int, microbatch: int) -> None:
        room = self._stages[index].empty_output_gradients(microbatch)
        self._gradients[index, microbatch] = self._receive(room, index + 1)

    def _take(self, box: _Box, index: int, microbatch: int) -> Tensors:
        """Wait for a message that is on its way; one from a stage on this rank is there."""
        message = box.pop((index, microbatch))
        if message.arriving:
            with self._recorder.span(Action.wait, stage=index, microbatch=microbatch):
                for work in message.arriving:
                    work.wait()
        return message.tensors

    def _send(self, box: _Box, index: int, to_stage: int, microbatch: int) -> None:
        rank = self._link.rank_of_stage[to_stage]
        with self._recorder.span(Action.send, stage=index, microbatch=microbatch):
            for tensor in box.pop((to_stage, microbatch)).tensors:
                work = dist.isend(tensor.contiguous(), group=self._link.group, group_dst=rank)
                assert work is not None
                self._sending.append(work)
        while self._sending and self._sending[0].is_completed():
            # Work that is held holds its tensor.
            self._sending.popleft()

    def _receive(self, room: Tensors, from_stage: int) -> _Message:
        rank = self._link.rank_of_stage[from_stage]
        works = [dist.irecv(tensor, group=self._link.group, group_src=rank) for tensor in room]
        return _Message(room, [work for work in works if work is not None])
