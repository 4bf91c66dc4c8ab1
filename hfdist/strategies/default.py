"""What engines have in common whose step is the Hugging Face Trainer's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.models.flops import ModelSize, measure_size
from hfdist.optim.probe import Reach
from hfdist.pipeline.timeline import ScheduleTrace
from hfdist.strategies.base import Batch, TrainerHooks


class DefaultEngine:
    """Forward, backward, evaluation and clipping as the Trainer does them; each rank runs the whole model."""

    reduces_gradients = False
    runs_whole_model = True
    optimizer_sees = Reach.model
    loss_group: dist.ProcessGroup | None = None
    schedule_trace: ScheduleTrace | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def size(self) -> ModelSize:
        """Counted anew: adapters may have been added."""
        return measure_size(cast(PreTrainedModel, self.model))

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, default: TrainerHooks) -> torch.Tensor:
        """Run the Trainer's own training step."""
        return default.training_step(default.model, batch, num_items)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], default: TrainerHooks) -> list[Any]:
        """Run the model on this rank's batch, in one part."""
        with torch.no_grad():
            return [function(default.model, batch)]

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Its own."""
        return tuple(parameter.shape)

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All of them."""
        return self.model.named_parameters()

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """Clip, or where DeepSpeed has clipped give the norm, as the Trainer does."""
        return default()
