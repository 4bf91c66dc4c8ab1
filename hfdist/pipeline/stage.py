"""A stage as torch's pipeline schedules drive it, with shapes that may change from micro batch to micro batch.

The schedules decide what happens when, and post the sends and receives. torch's own stage infers shapes once, and
then dies of another sequence length; this one allocates each receive by what is known of that micro batch's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

# Private: how torch splits a backward into input and weight gradients. tests/unit/pipeline/test_seams.py watches it.
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from hfdist.pipeline.link import Link
from hfdist.pipeline.parcel import Header, unpack
from hfdist.pipeline.timeline import Action, Recorder
from hfdist.pipeline.view import View

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Chunk:
    """What a stage keeps of one micro batch between its forward and its last backward."""

    header: Header | None
    """Of what the stage receives."""
    received: Tensors = ()
    outputs: Tensors = ()
    output_grads: tuple[torch.Tensor | None, ...] = ()
    input_grads: tuple[torch.Tensor | None, ...] = ()
    weight_groups: list[dict[str, Any]] | None = None
    """What is left to do for the weight gradients; None: nothing."""


@dataclass
class Step:
    """One pass of the schedule."""

    calls: Sequence[Callable[[Any], Any]]
    """For each micro batch: calls the model; on the last stage its value is the loss."""
    headers: list[dict[int, Header]]
    """For each micro batch: the header of what each stage receives."""
    chunks: dict[int, Chunk] = field(default_factory=dict)


class Stage(PipelineStage):
    """Runs a view under a schedule of `torch.distributed.pipelining`.

    Args:
        view: the stage's part of the model.
        index: of the stage.
        link: the ranks of the pipeline.
        recorder: takes the times of what is done.
        splits_backward: whether schedules may run weight gradients apart from input gradients. False for blocks that
            are compiled or checkpointed: those compute both at once, so running them apart would do all twice.
    """

    def __init__(
        self,
        view: View,
        index: int,
        link: Link,
        *,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        super().__init__(view, index, len(link.rank_of_stage), link.device, group=link.group)
        self.stage_index_to_group_rank = dict(enumerate(link.rank_of_stage))
        self._view = view
        self._recorder = recorder
        self._splits_backward = splits_backward
        self._step = Step([], [])

    def begin(self, calls: Sequence[Callable[[Any], Any]], headers: list[dict[int, Header]]) -> None:
        """Take the micro batches of the next pass."""
        self._step = Step(calls, headers)
        for microbatch, known in enumerate(headers):
            self._step.chunks[microbatch] = Chunk(header=None if self.is_first else known[self.stage_index])

    # ---- what a schedule calls: forward ----

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate what will be received, and say from whom."""
        chunk = self._step.chunks[fwd_chunk_id]
        if chunk.header is None:
            return []
        chunk.received = tuple(torch.empty(m.shape, dtype=m.dtype, device=self.device) for m in chunk.header.metas)
        return [self._p2p(dist.irecv, tensor, self.stage_index - 1) for tensor in chunk.received]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward of one micro batch."""
        chunk = self._step.chunks[fwd_chunk_id]
        with self._recorder.span(Action.forward, stage=self.stage_index, microbatch=fwd_chunk_id):
            incoming = None
            if chunk.header is not None:
                wanted = [meta.requires_grad for meta in chunk.header.metas]
                chunk.received = tuple(t.requires_grad_(w) for t, w in zip(chunk.received, wanted, strict=True))
                incoming = chunk.header.pack(chunk.received)
            value: Any = self._view.run(self._step.calls[fwd_chunk_id], incoming)
        if self.is_last:
            chunk.outputs = (value,)
            return value
        chunk.outputs = tuple(_sendable(tensor) for tensor in unpack(value)[1])
        return chunk.outputs

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Say what goes to the next stage."""
        if self.is_last:
            return []
        outputs = self._step.chunks[fwd_chunk_id].outputs
        with self._recorder.span(Action.send, stage=self.stage_index, microbatch=fwd_chunk_id):
            return [self._p2p(dist.isend, tensor.detach(), self.stage_index + 1) for tensor in outputs]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take over from a stage on the same rank."""
        self._step.chunks[mb_index].received = tuple(tensor.detach() for tensor in prev_stage_outputs)

    # ---- backward ----

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the gradients of the outputs."""
        if self.is_last:
            return []
        chunk = self._step.chunks[bwd_chunk_id]
        chunk.output_grads = tuple(torch.empty_like(t) if t.requires_grad else None for t in chunk.outputs)
        return [self._p2p(dist.irecv, grad, self.stage_index + 1) for grad in chunk.output_grads if grad is not None]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro batch; with `full_backward=False` for its input only."""
        chunk = self._step.chunks[bwd_chunk_id]
        if full_backward or not self._splits_backward:
            with self._recorder.span(Action.backward, stage=self.stage_index, microbatch=bwd_chunk_id):
                chunk.input_grads = self._backward(chunk)
            chunk.outputs = ()
        elif not self.is_first:
            with self._recorder.span(Action.backward_input, stage=self.stage_index, microbatch=bwd_chunk_id):
                grads: Any = None if self.is_last else list(chunk.output_grads)
                chunk.input_grads, chunk.weight_groups = stage_backward_input(
                    list(chunk.outputs), grads, list(chunk.received), self._view.parameters()
                )
            chunk.outputs = ()
        # The first stage has no input gradient: all its backward is done as weight gradient.

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run what is left of the backward of one micro batch."""
        chunk = self._step.chunks.pop(bwd_chunk_id)
        if not self._splits_backward:
            return
        with self._recorder.span(Action.backward_weight, stage=self.stage_index, microbatch=bwd_chunk_id):
            if self.is_first:
                self._backward(chunk)
            else:
                assert chunk.weight_groups is not None
                # A parameter that is used twice makes groups whose graphs overlap. All is freed with the chunk.
                stage_backward_weight(self._view.parameters(), chunk.weight_groups, retain_graph=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Say which gradients go to the previous stage."""
        if self.is_first:
            return []
        grads = [grad for grad in self._wanted_input_grads(bwd_chunk_id) if grad is not None]
        with self._recorder.span(Action.send, stage=self.stage_index, microbatch=bwd_chunk_id):
            return [self._p2p(dist.isend, grad.contiguous(), self.stage_index - 1) for grad in grads]

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Give the gradients to a stage on the same rank."""
        return self._wanted_input_grads(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take them from a stage on the same rank."""
        self._step.chunks[mb_index].output_grads = next_stage_bwd_outputs

    # ---- what torch would infer or do after a step, and this stage does not need ----

    def clear_runtime_states(self) -> None:
        """Each pass begins with `begin`."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Losses are already weighted by tokens, and the engine adds up gradients over data ranks."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
        return torch.ones(1, device=self.device)

    def _warmup_backward_result(self, received_result: Any = None) -> torch.Tensor:
        return torch.ones(1, device=self.device)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        # Schedules look here for sends to stages that are not neighbours.
        self.args_recv_info[0] = ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    # ---- own ----

    def _p2p(self, operation: Any, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])

    def _backward(self, chunk: Chunk) -> tuple[torch.Tensor | None, ...]:
        if not any(tensor.requires_grad for tensor in chunk.outputs):
            # All of this stage and of those before is frozen.
            return (None,) * len(chunk.received)
        if self.is_last:
            return stage_backward(chunk.outputs[0], None, list(chunk.received))
        return stage_backward(chunk.outputs, chunk.output_grads, list(chunk.received))

    def _wanted_input_grads(self, microbatch: int) -> tuple[torch.Tensor | None, ...]:
        """One for each received tensor that wants one, zeros where nothing flowed back."""
        chunk = self._step.chunks[microbatch]
        assert chunk.header is not None
        return tuple(
            (torch.zeros_like(tensor) if grad is None else grad) if meta.requires_grad else None
            for meta, tensor, grad in zip(chunk.header.metas, chunk.received, chunk.input_grads, strict=True)
        )


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and neither a view nor a leaf: split backwards detach it in place."""
    if tensor._is_view() or tensor.is_leaf or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
