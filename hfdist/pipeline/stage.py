"""One stage's part of one step: forwards and backwards, the latter whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from hfdist.pipeline.split_backward import backward_inputs
from hfdist.pipeline.stage_io import Header, unpack
from hfdist.pipeline.stage_module import StageModule
from hfdist.pipeline.timeline import Action, Recorder

Tensors = tuple[torch.Tensor, ...]


class _Graph(NamedTuple):
    """What is kept of a micro batch between its forward and its backward."""

    received: Tensors
    roots: list[torch.Tensor]
    """The outputs through which gradients flow."""

    def input_gradients(self) -> Tensors:
        """One for each tensor that wants one: zeros where nothing flowed back."""
        wanting = [tensor for tensor in self.received if tensor.requires_grad]
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanting)


class Stage:
    """Runs a view on the micro batches of one step. Each micro batch may have shapes of its own.

    Args:
        view: the stage's part of the model.
        index: of the stage.
        calls: for each micro batch: calls the model; on the last stage its value is the loss.
        headers: for each micro batch: of what the stage receives; None on the first stage.
        recorder: takes the times of what is done.
        splits_backward: whether weight gradients may run apart from input gradients. False for blocks that are
            compiled or checkpointed: those compute both at once, so running them apart would do all twice.
    """

    def __init__(
        self,
        view: StageModule,
        index: int,
        calls: Sequence[Callable[[Any], Any]],
        headers: Sequence[Header | None],
        *,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.is_first = view.is_first
        self.is_last = view.is_last
        self._view = view
        self._calls = calls
        self._headers = headers
        self._splits_backward = splits_backward
        self._span = partial(recorder.span, stage=index)
        self._graphs: dict[int, _Graph] = {}
        self._deferred: dict[int, Callable[[], Any]] = {}

    def empty_inputs(self, microbatch: int, device: torch.device) -> Tensors:
        """Room for what the stage receives."""
        header = self._headers[microbatch]
        assert header is not None
        return tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in header.metas)

    def empty_output_gradients(self, microbatch: int) -> Tensors:
        """Room for the gradients of what the forward gave."""
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
            value: Any = self._view.run(self._calls[microbatch], incoming)
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
            return _backward(self._graphs.pop(microbatch), output_gradients)

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """The same, but leave the gradients of parameters to `backward_weight`."""
        if not self._splits_backward:
            return self.backward(microbatch, output_gradients)
        graph = self._graphs.pop(microbatch)
        if self.is_first:
            # It receives nothing, so all its backward can wait.
            self._deferred[microbatch] = partial(_backward, graph, output_gradients)
            return ()
        with self._span(Action.backward_input, microbatch=microbatch):
            self._deferred[microbatch] = backward_inputs(
                graph.roots, output_gradients or None, graph.received, self._view.parameters()
            )
            return graph.input_gradients()

    def backward_weight(self, microbatch: int) -> None:
        """Run what `backward_input` has left."""
        if self._splits_backward:
            with self._span(Action.backward_weight, microbatch=microbatch):
                self._deferred.pop(microbatch)()


def _backward(graph: _Graph, output_gradients: Tensors) -> Tensors:
    if graph.roots:
        # Otherwise all of this stage and of those before is frozen.
        torch.autograd.backward(graph.roots, list(output_gradients) or None)
    return graph.input_gradients()


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous; and what the stage only hands on is not the leaf that it received."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_leaf else tensor.contiguous()
