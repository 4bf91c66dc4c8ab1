"""A stage in one step: its forwards, its backwards, and what it keeps between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from hfdist.pipeline.split_backward import backward_inputs
from hfdist.pipeline.stage_io import Header, tensors_of
from hfdist.pipeline.stage_module import StageModule
from hfdist.pipeline.timeline import Action, Recorder

Value = TypeVar("Value")
"""What a function of a model and a micro batch gives."""
Tensors = tuple[torch.Tensor, ...]
"""What travels between stages, or gradients of it."""
Batch = dict[str, torch.Tensor]
Microbatch = AbstractContextManager[Batch]
"""Gives what the model is called on. Entered for each forward, and for each backward, in which blocks may be computed
again."""


class _Graph(NamedTuple):
    """What is kept of a micro batch between its forward and its backward."""

    received: Tensors
    roots: list[torch.Tensor]
    """The outputs through which gradients flow."""
    side_loss: list[torch.Tensor]
    """What the stage adds to the loss by itself, if anything."""

    def starts(self, output_gradients: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Give where the backward begins, and with which gradients; those of a loss are ones."""
        of_outputs = output_gradients or map(torch.ones_like, self.roots)
        return [*self.roots, *self.side_loss], [*of_outputs, *map(torch.ones_like, self.side_loss)]

    def backward(self, output_gradients: Tensors) -> Tensors:
        """Run the whole backward, and give the gradients of what was received."""
        starts, gradients = self.starts(output_gradients)
        if starts:
            # Otherwise all of this stage and of those before is frozen.
            torch.autograd.backward(starts, gradients)
        return self.input_gradients()

    def input_gradients(self) -> Tensors:
        """Give a gradient for each received tensor that wants one: zeros where nothing flowed back."""
        wanting = [tensor for tensor in self.received if tensor.requires_grad]
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanting)


class Step(NamedTuple):
    """The micro batches of a step, and how a stage runs them."""

    microbatches: Sequence[Microbatch]
    loss: Callable[[PreTrainedModel, Batch], torch.Tensor]
    """Calls the model on a micro batch; on the last stage its value is the loss."""
    side_loss: Callable[[], torch.Tensor | None]
    """Gives, after each forward, what the stage adds to the loss by itself, or None."""


class Stage:
    """Runs a stage module on the micro batches of one step. Each micro batch may have shapes of its own.

    Args:
        module: the stage's part of the model.
        index: the number of the stage.
        step: the micro batches, and how they are run.
        headers: for each micro batch the header of what the stage receives; None on the first stage.
        recorder: takes the times of forwards and backwards.
        splits_backward: whether weight gradients may run apart from input gradients. False for blocks that are
            compiled or checkpointed: those compute both at once, so running them apart would do all twice.
    """

    def __init__(
        self,
        module: StageModule,
        index: int,
        step: Step,
        headers: Sequence[Header | None],
        *,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.is_first = module.is_first
        self.is_last = module.is_last
        self._module = module
        self._step = step
        self._headers = headers
        self._splits_backward = splits_backward
        self._span = partial(recorder.span, stage=index)
        self._graphs: dict[int, _Graph] = {}
        self._weight_backwards: dict[int, Callable[[], object]] = {}

    def empty_inputs(self, microbatch: int, device: torch.device) -> Tensors:
        """Allocate the tensors that the stage receives, without values."""
        header = self._headers[microbatch]
        assert header is not None
        return tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in header.metas)

    def empty_output_gradients(self, microbatch: int) -> Tensors:
        """Allocate the gradients of the forward's outputs through which gradients flow, without values."""
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
            value = self._module.run(partial(call_on, self._step.loss, self._step.microbatches[microbatch]), incoming)
            side = self._step.side_loss()
        outputs = (value,) if self.is_last else tuple(map(_sendable, tensors_of(value)))
        if torch.is_grad_enabled():
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            self._graphs[microbatch] = _Graph(received, roots, [] if side is None or not side.requires_grad else [side])
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Run the whole backward; gradients of parameters are added to what they have.

        There is one output gradient for each output through which gradients flow, and none for the loss. Gives the
        gradients of what was received, one for each tensor that wants one.
        """
        with self._span(Action.backward, microbatch=microbatch), self._step.microbatches[microbatch]:
            return self._graphs.pop(microbatch).backward(output_gradients)

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Run the half of the backward that gives the gradients of what was received, and return these.

        The gradients of parameters are left to `backward_weight`. A stage that does not split runs the whole backward.
        """
        if not self._splits_backward:
            return self.backward(microbatch, output_gradients)
        graph = self._graphs.pop(microbatch)
        if self.is_first:
            # The first stage sends no gradients back, so all its backward can wait.
            self._weight_backwards[microbatch] = partial(graph.backward, output_gradients)
            return ()
        with self._span(Action.backward_input, microbatch=microbatch):
            self._weight_backwards[microbatch] = backward_inputs(*graph.starts(output_gradients), graph.received)
            return graph.input_gradients()

    def backward_weight(self, microbatch: int) -> None:
        """Run what `backward_input` has left."""
        if self._splits_backward:
            with self._span(Action.backward_weight, microbatch=microbatch):
                self._weight_backwards.pop(microbatch)()


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor contiguous; what the stage only hands on must not be the leaf that it received."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_leaf else tensor.contiguous()


def call_on(
    function: Callable[[PreTrainedModel, Batch], Value], microbatch: Microbatch, model: PreTrainedModel
) -> Value:
    """Call a function on a model and a micro batch."""
    with microbatch as batch:
        return function(model, batch)
