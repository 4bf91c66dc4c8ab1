"""A pipeline as one rank sees it: whole steps through a schedule, and forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.config.pipeline import Schedule
from hfdist.pipeline.actions import plan, receive_early
from hfdist.pipeline.p2p import P2PChannel, relay
from hfdist.pipeline.preserve_state import preserve_state
from hfdist.pipeline.runtime import Runtime
from hfdist.pipeline.stage import Stage
from hfdist.pipeline.stage_io import Header
from hfdist.pipeline.stage_module import StageModule
from hfdist.pipeline.timeline import Recorder

Batch = dict[str, torch.Tensor]
Signature = tuple[tuple[str, str], ...]


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
        views: Mapping[int, StageModule],
        schedule: Schedule,
        link: P2PChannel,
        *,
        num_microbatches: int,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.views = dict(sorted(views.items()))
        self._link = link
        self._recorder = recorder
        self._splits_backward = splits_backward
        self._headers: dict[Signature, dict[int, Header]] = {}
        own = plan(schedule, link.rank_of_stage, num_microbatches)[dist.get_rank(link.group)]
        # Two computations earlier make a step 1 to 3 % shorter, and more of them gain nothing (benchmarks/pipeline.py).
        self._instructions = receive_early(own, 2) if dist.get_backend(link.group) == "gloo" else own

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
        stages = {
            index: Stage(
                view,
                index,
                calls,
                [known.get(index) for known in headers],
                recorder=self._recorder,
                splits_backward=self._splits_backward,
            )
            for index, view in self.views.items()
        }
        return Runtime(stages, self._link, self._recorder).run(self._instructions)

    def forward(self, microbatches: Sequence[Batch], call: Callable[[PreTrainedModel, Batch], Any]) -> list[Any]:
        """Run forwards only, for any number of micro batches; values on the rank of the last stage."""
        return relay(self.views, [partial(_call, call, batch) for batch in microbatches], self._link).values

    def _headers_for(self, batch: Batch, call: Callable[[PreTrainedModel], Any]) -> dict[int, Header]:
        """What this rank's stages receive for a micro batch of this shape. All ranks see the same batch, so they agree.

        A shape that is new costs a forward of one micro batch.
        """
        signature = tuple((name, _describe(batch[name])) for name in sorted(batch))
        if signature not in self._headers:
            with preserve_state(next(iter(self.views.values())).model):
                self._headers[signature] = relay(self.views, [call], self._link, runs_last_stage=False).headers[0]
        return self._headers[signature]


def _describe(value: Any) -> str:
    """Equal for values that give tensors of equal shapes."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _call(function: Callable[[PreTrainedModel, Batch], Any], batch: Batch, model: PreTrainedModel) -> Any:
    return function(model, batch)
