"""What the Trainer and accelerate do to a model and in a step, on fake tensors."""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import cast

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn

# Not public; see fake_ranks.py.
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.models.loss import LossHead, choose_loss
from hfdist.models.loss.chunked import CHUNK_LOGITS
from hfdist.models.recompute import checkpoint_blocks
from hfdist.optim.registry import find_optimizer, make_over
from hfdist.planning.tracing.fake_task import FakeTask
from hfdist.planning.tracing.trace import Trace
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Engine, TrainerHooks
from hfdist.strategies.traffic import Phase


def find_loss_head(
    config: RunConfig, model: PreTrainedModel, strategy: Strategy, device_type: str, *, by_size: bool = True
) -> LossHead | None:
    """Find the loss head of the run, on fake tensors, with chunks as large as on the run's device.

    The arguments are those of `choose_loss`.
    """
    loss_head = choose_loss(config, model, strategy, by_size=by_size)
    return None if loss_head is None else LossHead(CHUNK_LOGITS[device_type])


def make_optimizer(
    config: RunConfig, engine: Engine, device_type: str = "cpu", *, sets_up: bool = True
) -> torch.optim.Optimizer:
    """Make the optimizer as the Trainer does: weight decay on matrices only, and a group for each mesh of DTensors."""
    model = engine.model
    alike: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = len(engine.whole_shape(parameter)) >= 2
            alike[decays, getattr(parameter, "device_mesh", None)].append(parameter)
    decay = config.optimizer.weight_decay
    groups = [{"params": own, "weight_decay": decay * decays} for (decays, _), own in alike.items()]
    optimizer = make_over(find_optimizer(config.optimizer, warmup_steps=0), model, groups)
    if sets_up:
        engine.setup(model, SimpleNamespace(optimizer=optimizer), None)
    for group in optimizer.param_groups:
        if device_type == "cuda" and not group.get("fused") and group.get("foreach", True) is None:
            # torch's own choice there: all parameters of a group at once, which takes memory.
            group["foreach"] = True
    return optimizer


def run_step(
    config: RunConfig,
    strategy: Strategy,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    task: FakeTask,
    trace: Trace,
) -> None:
    """Run the last micro batch of a step (a pipeline: all), and the optimizer's step, as the Trainer does."""

    def backward(loss: torch.Tensor) -> None:
        trace.phase = Phase.backward
        loss.backward()

    runs_whole_step = strategy.topology.pipeline > 1
    num_microbatches = strategy.batch.num_microbatches if runs_whole_step else 1
    batch = task.batch(num_microbatches * config.train.micro_batch_size)
    num_items = task.count(batch)
    hooks = TrainerHooks(model=engine.model, loss=task.loss, backward=backward)
    trace.phase = Phase.forward
    engine.forward_backward(batch, num_items, hooks)
    trace.phase = Phase.optimizer
    engine.clip_grad_norm(config.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    task.compute_once()


def prepare_as_trainer(model: nn.Module, config: RunConfig) -> None:
    """Checkpoint and autocast as the Trainer and accelerate do once the engine is built; in place."""
    train = config.train
    if train.gradient_checkpointing:
        checkpoint_blocks(cast(PreTrainedModel, model), train.recompute, offloads=train.activation_offload)
    if train.precision is not Precision.fp32:
        dtype = torch.float16 if train.precision is Precision.fp16 else torch.bfloat16
        autocast = torch.autocast("cpu", dtype, cache_enabled=False)
        model.forward = MethodType(convert_outputs_to_fp32(autocast(type(model).forward)), model)
    model.train()
