"""One step of one rank of a pipeline: its instructions are run, and what stages give goes to those that take it.

torch has an executor of its own; on each action it spends 0.3 to 0.6 ms of the main thread, on profiler ranges,
wrappers and checks, which on the critical path makes steps 3 to 10 % longer than this loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, assert_never

import torch
import torch.distributed as dist

from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.instructions import Instruction, Operation
from hfdist.pipeline.stage import Stage, Tensors
from hfdist.pipeline.timeline import Action, Recorder


class _Message(NamedTuple):
    """What one stage takes for one micro batch: inputs, or gradients of its outputs."""

    tensors: Tensors
    works: Sequence[dist.Work] = ()
    """What to wait for before the tensors can be read."""


_Inbox = dict[tuple[int, int], _Message]
"""Messages by the stage that takes them, and by micro batch."""


class Runtime:
    """One step of one rank, whose stages are given by index. Takes the times of sends, and of waiting to receive."""

    def __init__(self, stages: Mapping[int, Stage], channel: P2PChannel, recorder: Recorder) -> None:
        self._stages = stages
        self._channel = channel
        self._recorder = recorder
        # What a stage gives lies here under the stage that takes it, until that runs, or until it is sent.
        self._inputs: _Inbox = {}
        self._gradients: _Inbox = {}
        self._losses: dict[int, torch.Tensor] = {}

    def run(self, instructions: Sequence[Instruction]) -> list[torch.Tensor]:
        """Run them; give the losses in order of micro batches if the last stage is here, else an empty list."""
        for operation, index, microbatch in instructions:
            stage = self._stages[index]
            match operation:
                case Operation.forward:
                    self._forward(stage, index, microbatch)
                case Operation.backward:
                    self._backward(stage.backward, stage, index, microbatch)
                case Operation.backward_input:
                    self._backward(stage.backward_input, stage, index, microbatch)
                case Operation.backward_weight:
                    stage.backward_weight(microbatch)
                case Operation.send_output:
                    self._send(self._inputs, index, index + 1, microbatch)
                case Operation.send_input_gradient:
                    self._send(self._gradients, index, index - 1, microbatch)
                case Operation.receive_input:
                    empty = stage.empty_inputs(microbatch, self._channel.device)
                    self._inputs[index, microbatch] = self._receive(empty, index - 1)
                case Operation.receive_output_gradient:
                    empty = stage.empty_output_gradients(microbatch)
                    self._gradients[index, microbatch] = self._receive(empty, index + 1)
                case _:
                    assert_never(operation)
        self._channel.flush()
        return [self._losses[microbatch] for microbatch in sorted(self._losses)]

    def _forward(self, stage: Stage, index: int, microbatch: int) -> None:
        outputs = stage.forward(microbatch, () if stage.is_first else self._take(self._inputs, index, microbatch))
        if stage.is_last:
            (self._losses[microbatch],) = outputs
        else:
            self._inputs[index + 1, microbatch] = _Message(outputs)

    def _backward(self, backward: Callable[[int, Tensors], Tensors], stage: Stage, index: int, microbatch: int) -> None:
        gradients = backward(microbatch, () if stage.is_last else self._take(self._gradients, index, microbatch))
        if not stage.is_first:
            self._gradients[index - 1, microbatch] = _Message(gradients)

    def _take(self, inbox: _Inbox, index: int, microbatch: int) -> Tensors:
        """Wait for a message that is on its way; one from a stage on this rank is there."""
        message = inbox.pop((index, microbatch))
        if message.works:
            with self._recorder.span(Action.wait, stage=index, microbatch=microbatch):
                for work in message.works:
                    work.wait()
        return message.tensors

    def _send(self, inbox: _Inbox, index: int, to_stage: int, microbatch: int) -> None:
        rank = self._channel.rank_of_stage[to_stage]
        with self._recorder.span(Action.send, stage=index, microbatch=microbatch):
            for tensor in inbox.pop((to_stage, microbatch)).tensors:
                self._channel.start_send(rank, tensor)

    def _receive(self, empty: Tensors, from_stage: int) -> _Message:
        rank = self._channel.rank_of_stage[from_stage]
        works = [dist.irecv(tensor, group=self._channel.group, group_src=rank) for tensor in empty]
        return _Message(empty, [work for work in works if work is not None])
