"""Share a tiny model or its sequences out to the ranks of a group, and compare an accumulated step with the whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hfdist.checkpoint.piece import WEIGHT
from hfdist.config.model import Loss
from hfdist.config.strategy import ContextMethod, Sharding
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.models.loss import LossHead
from hfdist.strategies.base import Strategy, TrainerHooks
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.select import make_strategy
from hfdist.strategies.self_check import GRADIENT_BOUND
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import (
    TOLERANCE,
    Gradients,
    compare_gradients,
    compare_losses,
    run_whole,
    take_gradients,
)

NUM_MICROBATCHES = 2
"""Of a rank."""
NUM_TENSOR_RANKS = NUM_EXPERT_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What came of sharding one model."""

    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    worst_parameter: str = ""
    reason: str = ""
    """Why the model was refused."""
    gradient_bound: float = TOLERANCE
    """Up to where gradients are called exact."""
    plan: str = ""
    """By which the matrices were sharded over tensor ranks, or how attention was shared over context ranks."""

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, or `wrong`."""
        if self.reason:
            return "refused"
        is_exact = self.loss_difference <= TOLERANCE and self.gradient_difference <= self.gradient_bound
        return "exact" if is_exact else "wrong"


def shard_types(model_types: Iterable[str]) -> dict[str, Sharded]:
    """Try types one after the other under FSDP2. All ranks of the group call it."""
    return try_types(model_types, sharding="fsdp2")


def tensor_types(model_types: Iterable[str], sharding: Sharding = Sharding.none) -> dict[str, Sharded]:
    """Try types one after the other over tensor ranks. All ranks of the group call it."""
    return try_types(model_types, tensor=NUM_TENSOR_RANKS, sharding=sharding.value)


def expert_types(model_types: Iterable[str]) -> dict[str, Sharded]:
    """Try types one after the other over expert ranks. All ranks of the group call it."""
    return try_types(model_types, expert=NUM_EXPERT_RANKS)


def try_types(model_types: Iterable[str], **layout: Any) -> dict[str, Sharded]:
    """Try types one after the other in a layout. All ranks of the group call it."""
    torch.set_num_threads(1)
    num_readers = dist.get_world_size() // layout.get("tensor", 1)
    # One for all: each has a mesh, whose process groups have threads.
    strategy = make_strategy(**layout, global_batch_size=NUM_MICROBATCHES * num_readers)
    return {model_type: try_type(model_type, strategy) for model_type in model_types}


def try_type(model_type: str, strategy: Strategy) -> Sharded:
    """Run two micro batches on each data rank, and all of them on the whole model."""
    size, rank = strategy.topology.data_size, strategy.topology.data_rank
    model = tiny_model(model_type)
    batches = [tiny_batch(model, seed=seed) for seed in range(NUM_MICROBATCHES * size)]
    whole = run_whole(model, batches)
    try:
        engine = strategy.build(model)
    except ConfigError as error:
        return Sharded(reason=f"{error.what}: {error.found}")
    own = slice(rank * NUM_MICROBATCHES, (rank + 1) * NUM_MICROBATCHES)
    *first, last = batches[own]
    # Without whole logits where the model has one head, and the last one with them.
    head = LossHead(Loss.chunked) if hasattr(model.get_output_embeddings(), "out_features") else None
    with engine.accumulating():
        losses = [_train(model, batch, head) for batch in first]
    losses.append(_train(model, last))
    engine.clip_grad_norm(0.0, lambda: None)
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    with torch.no_grad():
        # Into the parameters, whose pieces the engine knows; the data ranks have averaged, the whole model added up.
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter).copy_(local_tensor(parameter.grad) * size)
    gradients: Gradients = {}
    expected: Gradients = {}
    parts = engine._parts
    for piece in engine.pieces():
        if piece.key != WEIGHT or piece.name not in whole.gradients or piece.view.numel() == 0:
            continue
        name, reference = f"{piece.name}[{piece.start}:]", whole.gradients[piece.name]
        # What no loss depends on has a gradient of zeros under FSDP.
        is_unused = piece.name in unused or (reference is None and not piece.view.any())
        gradients[name] = None if is_unused else piece.view
        expected[name] = None if reference is None else piece.of_whole(reference)
    gradient_difference, worst_parameter = compare_gradients(gradients, expected)
    return Sharded(
        loss_difference=compare_losses(losses, whole.losses[own]),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
        # Ranks add up in another order, and a loss in chunks rounds otherwise; types that scale or recur enlarge that.
        gradient_bound=GRADIENT_BOUND,
        plan="" if parts is None else parts.description.partition(";")[0],
    )


def share_types(model_types: Iterable[str], method: ContextMethod) -> dict[str, Sharded]:
    """Try types one after the other, with the sequences shared. All ranks of the group call it."""
    torch.set_num_threads(1)
    layout = {"context": dist.get_world_size(), "context_method": method.value}
    strategy = make_strategy(**layout, global_batch_size=NUM_MICROBATCHES)
    return {model_type: share_type(model_type, strategy) for model_type in model_types}


def share_type(model_type: str, strategy: Strategy) -> Sharded:
    """Run two micro batches of packed documents, of which each rank has a part of the tokens."""
    model = tiny_model(model_type)
    batches = [packed(tiny_batch(model, seed=seed)) for seed in range(NUM_MICROBATCHES)]
    try:
        engine = strategy.build(copy.deepcopy(model))
    except ConfigError as error:
        return Sharded(reason=f"{error.what}: {error.found}")
    whole = run_whole(model, batches)
    hooks = TrainerHooks(model=engine.model, training_step=_train_share, loss=_train_share)
    losses = []
    for batch in batches:
        # A loss is a mean over targets.
        num_items = (batch["labels"][:, 1:] != IGNORED).sum()
        loss = engine.forward_backward(batch, num_items, hooks)
        dist.all_reduce(loss)
        losses.append(loss.item())
    for parameter in engine.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    gradients = {
        name: gradient
        for name, gradient in take_gradients(engine.model).items()
        if whole.gradients[name] is not None or gradient is None or gradient.any()
    }
    gradient_difference, worst_parameter = compare_gradients(gradients, whole.gradients)
    return Sharded(
        loss_difference=compare_losses(losses, whole.losses),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
        # As of tensor ranks: the sum has another order.
        gradient_bound=GRADIENT_BOUND,
        plan=engine.context.method.value,
    )


def packed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tokens of a batch as two documents, whose first tokens are no targets."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    start = ids.shape[1] // 3
    positions[:, start:] -= start
    labels[:, start] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _train_share(model: torch.nn.Module, batch: dict[str, torch.Tensor], num_items: torch.Tensor) -> torch.Tensor:
    loss = model(**batch, num_items_in_batch=num_items).loss
    loss.backward()
    return loss.detach()


def _train(model: torch.nn.Module, batch: dict[str, torch.Tensor], head: LossHead | None = None) -> float:
    with nullcontext() if head is None else head.deferring(model):
        loss = model(**batch).loss
    loss.backward()
    return loss.item()
