"""The two interfaces that carry hfdist: a Strategy says how a model becomes distributed, an Engine runs it.

What they do here is what fits a layout in which each rank runs the whole model by the Hugging Face Trainer's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import Piece
from hfdist.config.batch import BatchPlan
from hfdist.models.flops import ModelSize, measure_size
from hfdist.optim.probe import Reach
from hfdist.pipeline.timeline import ScheduleTrace
from hfdist.topology import Topology

Batch = dict[str, torch.Tensor]
Forward = Callable[[Batch, Callable[[nn.Module, Batch], Any]], list[Any]]
"""(batch, function) -> what function(model, part of the batch) gave; empty on ranks without logits."""


@dataclass(frozen=True, kw_only=True)
class ShardFractions:
    """Which part of the state of `engine.model` this rank holds, from 1 / data_size to 1."""

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """How the Hugging Face Trainer does a step, so that an engine that needs nothing special is one line a method."""

    model: nn.Module
    """As accelerate prepared it."""
    training_step: Callable[..., torch.Tensor]
    """(model, batch, num_items) -> detached loss: forward and backward of one micro batch."""
    loss: Callable[..., torch.Tensor]
    """(model, batch, num_items) -> loss to go backward from, times the number of processes; see `forward_backward`."""


class Engine:
    """What the trainer may ask of a distributed model. An engine never sees the trainer."""

    model: nn.Module
    """What the Trainer is given: the whole model, or this rank's part of it, under the model's own names."""

    reduces_gradients = False
    """Whether the engine itself adds up gradients over ranks, so that accelerate must not wrap the model in DDP."""

    runs_whole_model = True
    """Whether calling `model` gives logits on this rank (perhaps with the other ranks)."""

    loss_group: dist.ProcessGroup | None = None
    """The ranks that compute a loss at the same time as this one, if it does; None: all."""

    optimizer_sees = Reach.model
    """What this rank's optimizer is given whole: the model, its parameters, or single elements in flat buffers."""

    schedule_trace: ScheduleTrace | None = None
    """Where a step has a schedule: its times. Made by `attach`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def size(self) -> ModelSize:
        """Size of the whole model, counted anew: adapters may have been added."""
        return measure_size(cast(PreTrainedModel, self.model))

    def attach(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Take what accelerate made of the model (DDP, a DeepSpeed engine), of the optimizer and of the loss scale.

        Returns:
            The optimizer that the Trainer steps.
        """
        raise NotImplementedError

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, default: TrainerHooks) -> torch.Tensor:
        """Run forward and backward on one micro batch (a pipeline: on all of a step) and return its detached loss.

        The mean over all processes of what is returned is the loss of the global batch.

        Args:
            batch: tensors of shape [sequences, tokens].
            num_items: number of target tokens in the whole global batch.
            default: how the Trainer does it.
        """
        return default.training_step(default.model, batch, num_items)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], default: TrainerHooks) -> list[Any]:
        """Run forwards without gradients. Call it on all ranks of a model replica, under ZeRO-3 on all ranks.

        Args:
            batch: tensors of shape [sequences, ...].
            function: (model, part of the batch) -> anything made of what the model gives.
            default: how the Trainer does it.

        Returns:
            What `function` gave for each part, in order, on the one rank of each model replica that has logits; a
            part may end with copies of the batch's first row, without targets. On the other ranks: an empty list.
        """
        with torch.no_grad():
            return [function(default.model, batch)]

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """Clip by the norm over all parameters of the whole model, and return the norm before clipping."""
        return default()

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Give the shape of a parameter of `model` as the whole model has it."""
        return tuple(parameter.shape)

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """List the parameters that this rank holds whole between steps, as other ranks may, by the model's names."""
        return self.model.named_parameters()

    def pieces(self) -> Iterable[Piece]:
        """List what this rank holds of which named tensor: weights and optimizer state, for saving and loading."""
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """Give what a run needs to go on besides the pieces, as JSON: DeepSpeed's loss scale and counters."""
        return {}

    def restore_numbers(self, numbers: dict[str, Any]) -> None:
        """Take back what `numbers` gave, in this layout or in another one."""

    def loaded(self) -> None:
        """Make everything derived from the pieces true again after a checkpoint was read into them."""


class Strategy:
    """How one model becomes a distributed one. Cheap: needs no process group until `start`."""

    shares = ShardFractions()

    def __init__(self, topology: Topology, batch: BatchPlan) -> None:
        self.topology = topology
        self.batch = batch

    def training_arguments(self) -> dict[str, object]:
        """Fields of TrainingArguments that this layout needs."""
        return {
            "gradient_accumulation_steps": self.batch.num_microbatches,
            "per_device_train_batch_size": self.batch.micro_batch_size,
        }

    def agreed_arguments(self) -> dict[str, object]:
        """Fields of TrainingArguments that are the user's, and that this layout was made with as well."""
        return {}

    def start(self) -> None:
        """Do what must happen once the process group is up, under ZeRO-3 before the model is made. Again: nothing."""

    def partition(self, model: nn.Module) -> None:
        """Leave this rank's part in a model that is whole, in place, before its weights are drawn, read or moved."""

    def build(self, model: nn.Module) -> Engine:
        """Make the engine of a model that is whole or partitioned."""
        raise NotImplementedError


def build_mesh(topology: Topology) -> DeviceMesh:
    """Give the device mesh of the layout: `mesh.get_group("data")` and so on. A collective over all ranks."""
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    shape = topology.mesh_shape
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
