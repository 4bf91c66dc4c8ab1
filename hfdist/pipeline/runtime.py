"""One step of one rank: its stages run their instructions, and what they give goes to the stages that take it.

torch has an executor of its own; on each action it spends 0.3 to 0.6 ms of the main thread, on profiler ranges,
wrappers and checks, which on the critical path makes steps 3 to 10 % longer than this loop does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hfdist.pipeline.schedule import Instruction, Operation
from hfdist.pipeline.split_backward import backward_inputs
from hfdist.pipeline.stage_io import Header, P2PChannel, unpack
from hfdist.pipeline.stage_module import StageModule
from hfdist.pipeline.timeline import Action, Recorder

Tensors = tuple[torch.Tensor, ...]


class _Graph(NamedTuple):
    """What is kept of a micro batch between its forward and its backward."""

    received: Tensors
    roots: list[torch.Tensor]
    """The outputs through which gradients flow."""

    def backward(self, output_gradients: Tensors) -> Tensors:
        if self.roots:
            # Otherwise all of this stage and of those before is frozen.
            torch.autograd.backward(self.roots, list(output_gradients) or None)
        return self.input_gradients()

    def input_gradients(self) -> Tensors:
        """One for each tensor that wants one: zeros where nothing flowed back."""
        wanting = [tensor for tensor in self.received if tensor.requires_grad]
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanting)


class Stage:
    """Runs a stage module on the micro batches of one step. Each micro batch may have shapes of its own.

    Args:
        module: the stage's part of the model.
        index: of the stage.
        calls: for each micro batch: calls the model; on the last stage its value is the loss.
        headers: for each micro batch: of what the stage receives; None on the first stage.
        recorder: takes the times of what is done.
        splits_backward: whether weight gradients may run apart from input gradients. False for blocks that are
            compiled or checkpointed: those compute both at once, so running them apart would do all twice.
    """

    def __init__(
        self,
        module: StageModule,
        index: int,
        calls: Sequence[Callable[[Any], Any]],
        headers: Sequence[Header | None],
        *,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.is_first = module.is_first
        self.is_last = module.is_last
        self._module = module
        self._calls = calls
        self._headers = headers
        self._splits_backward = splits_backward
        self._span = partial(recorder.span, stage=index)
        self._graphs: dict[int, _Graph] = {}
        self._weight_backwards: dict[int, Callable[[], Any]] = {}

    def empty_inputs(self, microbatch: int, device: torch.device) -> Tensors:
        """Allocate what the stage receives."""
        header = self._headers[microbatch]
        assert header is not None
        return tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in header.metas)

    def empty_output_gradients(self, microbatch: int) -> Tensors:
        """Allocate the gradients of what the forward gave."""
        return tuple(torch.empty_like(tensor) for tensor in self._graphs[microbatch].roots)

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        """Run the forward; give what the next stage receives, or the loss alone."""
        header = self._headers[microbatch]
        with self._span(Action.forward, microbatch=microbatch):
            incoming = None
            if header is not None:
                for tensor, meta in zip(received, header.metas, strict=True):
                    tensor.requires_grad_(meta.requires_grad)
                incoming = header.pack(received)
            value: Any = self._module.run(self._calls[microbatch], incoming)
        outputs = (value,) if self.is_last else tuple(_sendable(tensor) for tensor in unpack(value)[1])
        self._graphs[microbatch] = _Graph(received, [tensor for tensor in outputs if tensor.requires_grad])
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Run the whole backward; gradients of parameters are added to what they have.

        Args:
            microbatch: which.
            output_gradients: one for each output through which gradients flow; none for the loss.

        Returns:
            Gradients of what was received, one for each tensor that wants one.
        """
        with self._span(Action.backward, microbatch=microbatch):
            return self._graphs.pop(microbatch).backward(output_gradients)

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Do the same, but leave the gradients of parameters to `backward_weight`."""
        if not self._splits_backward:
            return self.backward(microbatch, output_gradients)
        graph = self._graphs.pop(microbatch)
        if self.is_first:
            # It receives nothing, so all its backward can wait.
            self._weight_backwards[microbatch] = partial(graph.backward, output_gradients)
            return ()
        with self._span(Action.backward_input, microbatch=microbatch):
            self._weight_backwards[microbatch] = backward_inputs(
                graph.roots, output_gradients or None, graph.received, self._module.parameters()
            )
            return graph.input_gradients()

    def backward_weight(self, microbatch: int) -> None:
        """Run what `backward_input` has left."""
        if self._splits_backward:
            with self._span(Action.backward_weight, microbatch=microbatch):
                self._weight_backwards.pop(microbatch)()


class _Message(NamedTuple):
    """What one stage takes for one micro batch: inputs, or gradients of its outputs."""

    tensors: Tensors
    works: Sequence[dist.Work] = ()
    """What to wait for before the tensors can be read."""


_Inbox = dict[tuple[int, int], _Message]
"""Messages by the stage that takes them, and by micro batch."""


class Runtime:
    """One step of one rank.

    Args:
        stages: this rank's, by index.
        channel: to the ranks of the pipeline.
        recorder: takes the times of sends, and of waiting to receive.
    """

    def __init__(self, stages: Mapping[int, Stage], channel: P2PChannel, recorder: Recorder) -> None:
        self._stages = stages
        self._channel = channel
        self._recorder = recorder
        self._inputs: _Inbox = {}
        self._gradients: _Inbox = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._sending: deque[dist.Work] = deque()

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
        for work in self._sending:
            work.wait()
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
                work = dist.isend(tensor.contiguous(), group=self._channel.group, group_dst=rank)
                assert work is not None
                self._sending.append(work)
        while self._sending and self._sending[0].is_completed():
            # Work that is held holds its tensor.
            self._sending.popleft()

    def _receive(self, empty: Tensors, from_stage: int) -> _Message:
        rank = self._channel.rank_of_stage[from_stage]
        works = [dist.irecv(tensor, group=self._channel.group, group_src=rank) for tensor in empty]
        return _Message(empty, [work for work in works if work is not None])


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous; and what the stage only hands on is not the leaf that it received."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_leaf else tensor.contiguous()
