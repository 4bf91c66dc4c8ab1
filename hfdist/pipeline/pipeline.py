"""A pipeline as one rank sees it: whole steps through a schedule, and forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformers import PreTrainedModel

from hfdist.config.pipeline import ONE_F_ONE_B, Schedule
from hfdist.pipeline.link import Link, relay
from hfdist.pipeline.parcel import Header
from hfdist.pipeline.stage import Stage
from hfdist.pipeline.timeline import Recorder
from hfdist.pipeline.view import View

Batch = dict[str, torch.Tensor]
Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

_ONE_STAGE = {Schedule.gpipe: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B}
_SEVERAL_STAGES = {
    Schedule.interleaved_1f1b: ScheduleInterleaved1F1B,
    Schedule.interleaved_zero_bubble: ScheduleInterleavedZeroBubble,
    Schedule.zbv: ScheduleZBVZeroBubble,
    Schedule.dualpipev: ScheduleDualPipeV,
}


class Pipeline:
    """This rank's stages, under a schedule.

    Args:
        views: this rank's stages, by index.
        schedule: what happens when.
        link: to the neighbours.
        num_microbatches: of one step.
        recorder: takes the times of what is done.
        splits_backward: whether weight gradients may run apart from input gradients.
    """

    def __init__(
        self,
        views: Mapping[int, View],
        schedule: Schedule,
        link: Link,
        *,
        num_microbatches: int,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.views = dict(sorted(views.items()))
        self._num_microbatches = num_microbatches
        self._link = link
        self._headers: dict[Signature, dict[int, Header]] = {}
        self._stages = [
            Stage(view, index, link, recorder=recorder, splits_backward=splits_backward)
            for index, view in self.views.items()
        ]
        self._schedule = _make_schedule(schedule, self._stages, num_microbatches)

    def forward_backward(
        self, microbatches: Sequence[Batch], loss: Callable[[PreTrainedModel, Batch], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run one step's forwards and backwards; gradients are added to those of the parameters.

        Args:
            microbatches: as many as the schedule was made for; shapes may differ.
            loss: calls the model on one of them; the step's loss is the sum over all.

        Returns:
            The losses, in order, on the rank of the last stage; elsewhere an empty list.
        """
        calls = [partial(_call, loss, batch) for batch in microbatches]
        headers = [self._headers_for(batch, call) for batch, call in zip(microbatches, calls, strict=True)]
        for stage in self._stages:
            stage.begin(calls, headers)
        losses: list[torch.Tensor] = []
        # The loss is the last stage's own output, so there is no target; torch wants one for each micro batch.
        self._schedule.step(target=torch.arange(self._num_microbatches), losses=losses, return_outputs=False)
        return losses

    def forward(self, microbatches: Sequence[Batch], call: Callable[[PreTrainedModel, Batch], Any]) -> list[Any]:
        """Run forwards only, for any number of micro batches; values on the rank of the last stage."""
        return relay(self.views, [partial(_call, call, batch) for batch in microbatches], self._link).values

    def _headers_for(self, batch: Batch, call: Callable[[PreTrainedModel], Any]) -> dict[int, Header]:
        """What this rank's stages receive for a micro batch of this shape. All ranks see the same batch, so they agree.

        A shape that is new costs a forward of one micro batch.
        """
        signature = tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(batch.items()))
        if signature not in self._headers:
            with torch.random.fork_rng():
                self._headers[signature] = relay(self.views, [call], self._link, runs_last_stage=False).headers[0]
        return self._headers[signature]


def _call(function: Callable[[PreTrainedModel, Batch], Any], batch: Batch, model: PreTrainedModel) -> Any:
    return function(model, batch)


def _make_schedule(schedule: Schedule, stages: Sequence[Stage], num_microbatches: int) -> Any:
    options: dict[str, Any] = {"loss_fn": _take_output, "scale_grads": False}
    if schedule in _ONE_STAGE:
        (stage,) = stages
        return _ONE_STAGE[schedule](stage, num_microbatches, **options)
    runtime = _SEVERAL_STAGES[schedule](list(stages), num_microbatches, **options)
    # DualPipeV sends a forward's output only after the backward that it is paired with, so the next rank waits for
    # both. With each pair as two actions, the forward first, a step takes 2 to 7 % less (benchmarks/pipeline.py).
    runtime._prepare_schedule_with_comms(_without_pairs(runtime.pipeline_order))
    return runtime


def _without_pairs(orders: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {
        rank: [single for action in actions if action is not None for single in action.sub_actions or (action,)]
        for rank, actions in orders.items()
    }


def _take_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
