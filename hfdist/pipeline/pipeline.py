"""A pipeline as one rank sees it: whole steps through a schedule, and forwards alone.

The stages of a rank run their instructions, and what they give goes to the stages that take it. torch has an executor
of its own; on each action it spends 0.3 to 0.6 ms of the main thread, on profiler ranges, wrappers and checks, which on
the critical path makes steps 3 to 10 % longer than this loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.config.batch import IGNORED
from hfdist.config.strategy import Schedule
from hfdist.errors import ConfigError
from hfdist.models.routers import COUNTED
from hfdist.pipeline.schedule import FORWARDS, Instruction, Operation, plan, receive_early
from hfdist.pipeline.split_backward import backward_inputs
from hfdist.pipeline.stage_io import Header, P2PChannel, tensors_of, unpack
from hfdist.pipeline.stage_module import StageModule, preserve_state
from hfdist.pipeline.timeline import Action, Recorder
from hfdist.pipeline.whole_model import make_whole

Value = TypeVar("Value")
Tensors = tuple[torch.Tensor, ...]
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
        """Where the backward begins, and with which gradients; a loss has none."""
        of_outputs = output_gradients or map(torch.ones_like, self.roots)
        return [*self.roots, *self.side_loss], [*of_outputs, *map(torch.ones_like, self.side_loss)]

    def backward(self, output_gradients: Tensors) -> Tensors:
        starts, gradients = self.starts(output_gradients)
        if starts:
            # Otherwise all of this stage and of those before is frozen.
            torch.autograd.backward(starts, gradients)
        return self.input_gradients()

    def input_gradients(self) -> Tensors:
        """One for each tensor that wants one: zeros where nothing flowed back."""
        wanting = [tensor for tensor in self.received if tensor.requires_grad]
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanting)


class Step(NamedTuple):
    """What the stages of a rank run."""

    microbatches: Sequence[Microbatch]
    loss: Callable[[PreTrainedModel, Batch], torch.Tensor]
    """Calls the model on a micro batch; on the last stage its value is the loss."""
    side_loss: Callable[[], torch.Tensor | None]
    """Gives, after each forward, what the stage adds to the loss by itself, or None."""


class Stage:
    """Runs a stage module on the micro batches of one step. Each micro batch may have shapes of its own.

    Args:
        module, index: the stage's part of the model, and its number.
        step: what it runs.
        headers: for each micro batch: of what the stage receives; None on the first stage.
        recorder: takes the times of what is done.
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
            value = self._module.run(partial(_call, self._step.loss, self._step.microbatches[microbatch]), incoming)
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
        """Do the same, but leave the gradients of parameters to `backward_weight`."""
        if not self._splits_backward:
            return self.backward(microbatch, output_gradients)
        graph = self._graphs.pop(microbatch)
        if self.is_first:
            # It receives nothing, so all its backward can wait.
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


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous; and what the stage only hands on is not the leaf that it received."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_leaf else tensor.contiguous()


_NEVER_FILLED = {"labels": IGNORED, "shift_labels": IGNORED, COUNTED: False}
"""What rows that fill up a batch have in place of a copy."""


class Pipeline:
    """This rank's stages (`modules`, by index), under a schedule of so many micro batches a step; see `Stage`.

    The ranks of `expert_group` must call their blocks at the same time.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        schedule: Schedule,
        channel: P2PChannel,
        *,
        num_microbatches: int,
        recorder: Recorder,
        splits_backward: bool,
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._expert_group = expert_group
        self.modules = dict(sorted(modules.items()))
        self._channel = channel
        self._recorder = recorder
        self._splits_backward = splits_backward
        self._headers: dict[tuple[str, ...], dict[int, Header]] = {}
        own = plan(schedule, channel.rank_of_stage, num_microbatches)[dist.get_rank(channel.group)]
        # Two computations earlier make a step 1 to 3 % shorter, and more of them gain nothing (benchmarks/pipeline.py).
        self._instructions = receive_early(own, 2) if channel.receives_early else own

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss: Callable[[PreTrainedModel, Batch], torch.Tensor],
        side_loss: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Run one step's forwards and backwards; gradients are added to those of the parameters.

        Without gradients, its forwards alone.

        Args:
            microbatches: as many as the schedule was made for; shapes may differ.
            loss: calls the model on one of them; the step's loss is the sum over all.
            side_loss: gives what a stage has added to the loss in the forward before, or None.

        Returns:
            The losses, in order, on the rank of the last stage; elsewhere an empty list.
        """
        step = Step(microbatches, loss, side_loss)
        headers = self._learn_headers(microbatches, loss)
        stages = {
            index: Stage(
                module,
                index,
                step,
                [known.get(index) for known in headers],
                recorder=self._recorder,
                splits_backward=self._splits_backward,
            )
            for index, module in self.modules.items()
        }
        instructions = self._instructions
        if not torch.is_grad_enabled():
            instructions = [instruction for instruction in instructions if instruction.operation in FORWARDS]
        return Runtime(stages, self._channel, self._recorder).run(instructions)

    def forward(
        self, microbatches: Sequence[Microbatch], call: Callable[[PreTrainedModel, Batch], Value]
    ) -> list[Value]:
        """Run forwards only, for any number of micro batches; values on the rank of the last stage."""
        # One micro batch goes through all of a rank's stages before the next does: on NCCL, where a send may wait for
        # its receive, ranks with several stages would otherwise wait for each other.
        calls = (partial(_call, call, microbatch) for microbatch in microbatches)
        values = [value for run in calls for value in self._run_stages(run)[0]]
        self._channel.flush()
        return values

    def call_whole(self, batch: Microbatch, call: Callable[[PreTrainedModel, Batch], Value]) -> Value:
        """Call a function on a model that acts as the whole one, on all ranks of the pipeline: see `make_whole`."""
        stages = list(self.modules.values())
        whole = make_whole(stages, lambda call: self._run_stages(call)[0], self._channel.broadcast_from_last_stage)
        value = _call(call, batch, whole)
        self._channel.flush()
        return value

    def _learn_headers(
        self, microbatches: Sequence[Microbatch], call: Callable[[PreTrainedModel, Batch], object]
    ) -> list[dict[int, Header]]:
        """Give what this rank's stages receive for each micro batch, by stage.

        All ranks see the same batch, so they agree. A shape that is new costs a forward of one micro batch.
        """
        signatures = list(map(_signature, microbatches))
        for place in self._new_places(signatures):
            # A header says through what gradients flow.
            with preserve_state(next(iter(self.modules.values())).model), torch.enable_grad():
                run = partial(_call, call, microbatches[place])
                _, self._headers[signatures[place]] = self._run_stages(run, runs_last_stage=False)
            self._channel.flush()
        return [self._headers[signature] for signature in signatures]

    def _new_places(self, signatures: Sequence[tuple[str, ...]]) -> list[int]:
        """Find the micro batches of which headers must be learnt, on this rank or on another one that shares experts.

        A collective of these.
        """
        are_new = [
            signature not in self._headers and signature not in signatures[:place]
            for place, signature in enumerate(signatures)
        ]
        if self._expert_group is not None:
            any_new = torch.tensor(are_new, dtype=torch.int32, device=self._channel.device)
            dist.all_reduce(any_new, op=dist.ReduceOp.MAX, group=self._expert_group)
            are_new = any_new.tolist()
        return [place for place, is_new in enumerate(are_new) if is_new]

    def _run_stages(
        self, run: Callable[[PreTrainedModel], Value], *, runs_last_stage: bool = True
    ) -> tuple[list[Value], dict[int, Header]]:
        """Run one forward. Give its value, on the rank of the last stage, and what stages received.

        All ranks of a pipeline call this. A rank without the value gives an empty list.
        """
        values: list[Value] = []
        headers: dict[int, Header] = {}
        for index, module in self.modules.items():
            incoming = None if module.is_first else self._channel.receive(index)
            if incoming is not None:
                headers[index] = unpack(incoming)[0]
            if not module.is_last:
                self._channel.send(index + 1, module.run(run, incoming))
            elif runs_last_stage:
                values.append(module.run(run, incoming))
        return values, headers


def _signature(microbatch: Microbatch) -> tuple[str, ...]:
    with microbatch as batch:
        return tuple(f"{name} {_describe(batch[name])}" for name in sorted(batch))


def _describe(value: object) -> str:
    """Equal for values that give tensors of equal shapes."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _call(function: Callable[[PreTrainedModel, Batch], Value], microbatch: Microbatch, model: PreTrainedModel) -> Value:
    with microbatch as batch:
        return function(model, batch)


def split_batch(batch: dict[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Split a data rank's batch of a step along its first dimension, the same on every rank of its pipeline.

    A batch that does not divide, such as the last one of a dataset, is filled up with copies of its first row that
    have no target: a loss that is a sum over targets does not see them.

    Args:
        batch: tensors whose first dimension is the sequences; numbers, and tensors whose first dimension is 1 so that
            they stand for all sequences, go to every micro batch.
        num_microbatches: number of micro batches of a step.

    Raises:
        ConfigError: a tensor that is not split by sequences, such as the bounds of documents in a row without padding.
    """
    num_rows = len(batch["input_ids"])
    size = -(-num_rows // num_microbatches)
    missing = size * num_microbatches - num_rows
    parts: dict[str, list[object]] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) == 1 < num_rows:
            parts[name] = [value] * num_microbatches
            continue
        _check_has_rows(name, value, num_rows)
        filler = value[:1].expand(missing, *value.shape[1:])
        if name in _NEVER_FILLED:
            filler = torch.full_like(filler, _NEVER_FILLED[name])
        parts[name] = list(torch.cat([value, filler]).split(size)) if missing else list(value.split(size))
    return [{name: values[index] for name, values in parts.items()} for index in range(num_microbatches)]


def _check_has_rows(name: str, value: torch.Tensor, num_rows: int) -> None:
    is_of_tokens = name.startswith("cu_seq_lens") or (name == "position_ids" and value.ndim > 2)
    if len(value) != num_rows or is_of_tokens:
        raise ConfigError(
            "a pipeline splits a batch into micro batches by its sequences, and this tensor has none",
            where=f"batch['{name}']",
            found=f"shape {tuple(value.shape)}, with {num_rows} sequences",
            allowed=f"tensors of shape [{num_rows}, ...]",
            hint="another data_collator",
        )
