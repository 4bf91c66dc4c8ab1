"""Share a tiny model out to tensor or expert ranks, and compare an accumulated step with the whole."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hfdist.checkpoint.piece import WEIGHT
from hfdist.config.model import Loss
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError
from hfdist.models.loss import LossHead
from hfdist.strategies.base import Strategy
from hfdist.strategies.gradients import local
from hfdist.strategies.select import make_strategy
from hfdist.strategies.self_check import GRADIENT_BOUND
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.sharding import NUM_MICROBATCHES, Sharded
from tests.zoo.splitting import Gradients, compare_gradients, compare_losses, run_whole

NUM_TENSOR_RANKS = NUM_EXPERT_RANKS = 2


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
    with engine.accumulating():
        # Without whole logits where the model allows it, and the last one with them.
        losses = [_train(model, batch, LossHead(Loss.chunked)) for batch in first]
    losses.append(_train(model, last))
    engine.clip_grad_norm(0.0, lambda: None)
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    with torch.no_grad():
        # Into the parameters, whose pieces the engine knows; the data ranks have averaged, the whole model added up.
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter).copy_(local(parameter.grad) * size)
    gradients: Gradients = {}
    expected: Gradients = {}
    for piece in engine.pieces():
        if piece.key != WEIGHT or piece.name not in whole.gradients or piece.view.numel() == 0:
            continue
        name, reference = f"{piece.name}[{piece.start}:]", whole.gradients[piece.name]
        gradients[name] = None if piece.name in unused else piece.view
        expected[name] = None if reference is None else piece.of_whole(reference)
    gradient_difference, worst_parameter = compare_gradients(gradients, expected)
    return Sharded(
        loss_difference=compare_losses(losses, whole.losses[own]),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
        # The ranks add up in another order than the whole model; types that scale or recur enlarge that.
        gradient_bound=GRADIENT_BOUND,
        plan=engine._parts.description.partition(";")[0],
    )


def _train(model: torch.nn.Module, batch: dict[str, torch.Tensor], head: LossHead | None = None) -> float:
    with nullcontext() if head is None else head.deferring(model):
        loss = model(**batch).loss
    loss.backward()
    return loss.item()
