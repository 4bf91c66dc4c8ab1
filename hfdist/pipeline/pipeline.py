"""A pipeline as one rank sees it: whole steps through a schedule, and forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.config.strategy import Schedule
from hfdist.models.image_text import ImageBatch, image_example
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.instructions import FORWARDS, list_instructions, receive_early
from hfdist.pipeline.runtime import Runtime
from hfdist.pipeline.stage import Batch, Microbatch, Stage, Step, Value, call_on
from hfdist.pipeline.stage_io import Header, unpack
from hfdist.pipeline.stage_module import StageModule, preserve_state
from hfdist.pipeline.timeline import Recorder
from hfdist.pipeline.whole_model import make_whole

_MOST_SHAPES = 4096
"""Shapes of micro batches that are known at a time: sizes of images may be others each time."""
_SIZES_DIMENSIONS = 2
"""The most axes of a tensor that has sizes of images."""


class Pipeline:
    """The stages of one rank of a pipeline, and the channel to the others.

    Args:
        modules: this rank's stages, by their index in the pipeline.
        schedule: gives the order in which ranks compute.
        channel: sends to other ranks, and receives from them.
        num_microbatches: micro batches of a step.
        recorder: takes the times of what this rank does.
        splits_backward: whether gradients of weights may be computed apart from those of inputs.
        expert_group: ranks that share experts, so that they must call their blocks at the same time; None: no others.
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
        self._images = image_example(next(iter(self.modules.values())).model)
        self._headers: dict[tuple[str, ...], dict[int, Header]] = {}
        own = list_instructions(schedule, channel.rank_of_stage, num_microbatches)[dist.get_rank(channel.group)]
        # Two computations earlier: a step is 1 to 3 % shorter, and three gain nothing more (benchmarks/pipeline.py).
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
        calls = (partial(call_on, call, microbatch) for microbatch in microbatches)
        values = [value for run in calls for value in self._run_stages(run)[0]]
        self._channel.flush()
        return values

    def call_whole(self, batch: Microbatch, call: Callable[[PreTrainedModel, Batch], Value]) -> Value:
        """Call a function on a model that acts as the whole one, on all ranks of the pipeline: see `make_whole`."""
        stages = list(self.modules.values())
        whole = make_whole(stages, lambda call: self._run_stages(call)[0], self._channel.broadcast_from_last_stage)
        value = call_on(call, batch, whole)
        self._channel.flush()
        return value

    def _learn_headers(
        self, microbatches: Sequence[Microbatch], call: Callable[[PreTrainedModel, Batch], object]
    ) -> list[dict[int, Header]]:
        """Give what this rank's stages receive for each micro batch, by stage.

        All ranks see the same batch, so they agree. A shape that is new costs a forward of one micro batch.
        """
        signatures = [_signature(microbatch, self._images) for microbatch in microbatches]
        # Ranks of a pipeline see the same batches, so all forget the same shapes.
        for oldest in list(self._headers)[: max(0, len(self._headers) - _MOST_SHAPES)]:
            del self._headers[oldest]
        for place in self._new_places(signatures):
            # A header says through what gradients flow.
            with preserve_state(next(iter(self.modules.values())).model), torch.enable_grad():
                run = partial(call_on, call, microbatches[place])
                _, self._headers[signatures[place]] = self._run_stages(run, runs_last_stage=False)
            self._channel.flush()
        return [self._headers[signature] for signature in signatures]

    def _new_places(self, signatures: Sequence[tuple[str, ...]]) -> list[int]:
        """Find the micro batches whose headers must be learnt, on this rank or on another one that shares experts.

        A collective of the ranks that share experts.
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


def _signature(microbatch: Microbatch, images: ImageBatch | None) -> tuple[str, ...]:
    """Say of what shapes a micro batch is, as far as these decide what travels.

    Whether it has images decides through what gradients flow; their sizes decide shapes of features alone.
    """
    of_images: frozenset[str] = frozenset() if images is None else images.names
    has_features = images is not None and bool(images.features)
    parts = []
    with microbatch as batch:
        for name in sorted(batch):
            value = batch[name]
            described = _describe(value) if name not in of_images or has_features else ""
            if name in of_images and described and not value.is_floating_point():
                # Sizes of images in numbers; of masks how much they show.
                described += str(value.tolist() if value.ndim <= _SIZES_DIMENSIONS else int(value.count_nonzero()))
            parts.append(f"{name} {described}")
    return tuple(parts)


def _describe(value: object) -> str:
    """Give a text that is equal for values that give tensors of equal shapes."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
