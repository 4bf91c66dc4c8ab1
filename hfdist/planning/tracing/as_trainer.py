"""What the Trainer and accelerate do to a model and in a step, on fake tensors."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import cast

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn

# Not public; see fake_ranks.py.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.config.batch import IGNORED
from hfdist.config.data import Packing
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskConfig
from hfdist.config.train import Precision
from hfdist.models.loss import LossHead, choose_loss
from hfdist.models.loss.chunked import CHUNK_LOGITS
from hfdist.models.loss.distillation import TOP_IDS, TOP_LOGS
from hfdist.models.recompute import checkpoint_blocks
from hfdist.optim.registry import find_optimizer, make_over
from hfdist.planning.tracing.fake_teacher import Teaching
from hfdist.planning.tracing.trace import Trace
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch, Engine, TrainerHooks
from hfdist.strategies.traffic import Phase

SHORT_DOCUMENT = 2
"""Tokens of the second document in each traced sequence."""


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
    loss_head: LossHead | None,
    teaching: Teaching | None,
    trace: Trace,
) -> None:
    """Run the last micro batch of a step (a pipeline: all), and the optimizer's step, as the Trainer does."""

    def backward(loss: torch.Tensor) -> None:
        trace.phase = Phase.backward
        loss.backward()

    runs_whole_step = strategy.topology.pipeline > 1
    batch = make_batch(config, strategy.batch.num_microbatches if runs_whole_step else 1)
    num_items = (batch["labels"][:, 1:] != IGNORED).sum()
    hooks = TrainerHooks(model=engine.model, loss=loss_function(engine.model, loss_head, teaching), backward=backward)
    trace.phase = Phase.forward
    engine.forward_backward(batch, num_items, hooks)
    trace.phase = Phase.optimizer
    engine.clip_grad_norm(config.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


@unset_fake_temporarily()
def make_batch(config: RunConfig, number: int = 1) -> Batch:
    """Make micro batches of real numbers: without packing a document a sequence, else another of two tokens after it.

    Nothing is known of the run's documents. Longer ones hold more: attention with dropout or soft caps keeps scores of
    tokens x tokens. A second one makes borders, or a mask. What is kept of a teacher comes with them.
    """
    shape = number * config.train.micro_batch_size, config.data.sequence_length
    ids, kept = torch.zeros(shape, dtype=torch.int64), make_kept(config.task, shape)
    if config.data.packing is Packing.none:
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), **kept}
    positions, start = torch.arange(shape[1]).repeat(shape[0], 1), max(shape[1] - SHORT_DOCUMENT, 1)
    positions[:, start:] -= start
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORED), "position_ids": positions, **kept}


def make_kept(task: TaskConfig, shape: tuple[int, int]) -> Batch:
    """Make what is kept of a teacher for rows of this shape; nothing where nothing is."""
    count = task.teacher_top_k
    if count is None:
        return {}
    # One number each: real ones may be many.
    ids, logs = torch.zeros(count, dtype=torch.int32), torch.zeros(count + 1)
    return {TOP_IDS: ids.expand(*shape, count), TOP_LOGS: logs.expand(*shape, count + 1)}


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


def loss_function(
    model: nn.Module, loss_head: LossHead | None, teaching: Teaching | None
) -> Callable[..., torch.Tensor]:
    """Make the function (prepared model or stage, batch, num_items) -> loss of a micro batch, as the Trainer has it."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_counts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def compute_loss(prepared: nn.Module, batch: Batch, num_items: torch.Tensor | None) -> torch.Tensor:
        if teaching is not None:
            return teaching.loss(loss_head, prepared, batch) / (1 if num_items is None else num_items)
        named = {"num_items_in_batch": num_items} if takes_counts else {}
        with nullcontext() if loss_head is None else loss_head.deferring(prepared):
            return cast(torch.Tensor, prepared(**batch, **named).loss)

    return compute_loss
