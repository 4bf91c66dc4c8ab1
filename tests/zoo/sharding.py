"""Share a tiny model or its sequences out to the ranks of a group, and compare an accumulated step with the whole."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hfdist.checkpoint.export import export_model
from hfdist.checkpoint.hub_pieces import hub_pieces
from hfdist.checkpoint.piece import WEIGHT
from hfdist.collectives import on_rank_zero
from hfdist.config.strategy import ContextMethod, Sharding
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError, PartitionError
from hfdist.models.loss import LossHead
from hfdist.models.names.hub_names import find_hub_names
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Engine, TrainerHooks
from hfdist.strategies.from_python import make_strategy
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.pieces import list_pieces
from hfdist.strategies.self_check import GRADIENT_BOUND
from tests.zoo.hub_files import differing, filled
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import (
    TOLERANCE,
    Batch,
    Gradients,
    Loss,
    compare_gradients,
    compare_losses,
    model_loss,
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
    saved: str = ""
    """What of the saved folder differs from that of the whole model, if anything."""

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, or `wrong`."""
        if self.reason:
            return "refused"
        is_exact = (
            not self.saved and self.loss_difference <= TOLERANCE and self.gradient_difference <= self.gradient_bound
        )
        return "exact" if is_exact else "wrong"


def build_engine(strategy: Strategy, model: PreTrainedModel) -> Engine:
    """As a Trainer does: the names of the files are those of the whole model."""
    find_hub_names(model)
    return strategy.build(model)


def compare_saved(engine: Engine, whole: PreTrainedModel) -> str:
    """Save the folder of a model in its layout, unused weights too, and compare it with the whole model's tensors.

    All ranks of the group call it, before the model is changed. That `save_pretrained` writes the same of a whole model
    test_hub_names.py says; it imports DeepSpeed, which takes each fork ten seconds.

    Returns:
        The first tensors that one has alone, or that differ in one bit; empty: none.
    """
    names = find_hub_names(engine.model)
    folder = Path(on_rank_zero(tempfile.mkdtemp))
    export_model(folder, engine.weights(), lambda made: None, names=names)

    def compare() -> str:
        files = (load_file(file) for file in folder.glob("*.safetensors"))
        saved = {name: value.reshape(-1) for tensors in files for name, value in tensors.items()}
        expected = filled(hub_pieces(list_pieces(whole, None), names))
        # Some classes leave tensors out of their files that their config gives.
        wrong = differing(saved, {name: value for name, value in expected.items() if name in names.shapes})
        return ", ".join(sorted(wrong)[:3])

    try:
        found: str = on_rank_zero(compare)
    finally:
        on_rank_zero(lambda: shutil.rmtree(folder))
    return found


def stage_types(model_types: Iterable[str]) -> dict[str, Sharded]:
    """Split types over the ranks of a pipeline, one after the other, and save them. All ranks of the group call it.

    splitting.py compares how they train.
    """
    torch.set_num_threads(1)
    size = dist.get_world_size()
    strategy = make_strategy(pipeline=size, global_batch_size=size)
    return {model_type: stage_type(model_type, strategy) for model_type in model_types}


def stage_type(model_type: str, strategy: Strategy) -> Sharded:
    """Split one type; what only more than text would train is saved, too."""
    model = tiny_model(model_type)
    try:
        engine = build_engine(strategy, copy.deepcopy(model))
    except (ConfigError, PartitionError) as error:
        return Sharded(reason=f"{error.what}: {error.found}")
    return Sharded(saved=compare_saved(engine, model))


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
    model = tiny_model(model_type)
    batches = [tiny_batch(model, seed=seed) for seed in range(NUM_MICROBATCHES * strategy.topology.data)]
    # Without whole logits where the model has one head.
    head = LossHead() if hasattr(model.get_output_embeddings(), "out_features") else None
    return compare_sharded(model, batches, strategy, head=head)


def compare_sharded(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    strategy: Strategy,
    *,
    loss: Loss = model_loss,
    head: LossHead | None = None,
) -> Sharded:
    """Run the data rank's share of the micro batches on its part of the model, and all of them on the whole model.

    Args:
        model: whole; it is changed.
        batches: `NUM_MICROBATCHES` for each data rank.
        strategy: shards it.
        loss: of a micro batch.
        head: in place of the logits of all but the last micro batch; None: they are whole.
    """
    size, rank = strategy.topology.data, strategy.topology.data_rank
    # Before a forward: some models keep what one computes, and cannot be copied after it.
    given = copy.deepcopy(model)
    whole = run_whole(model, batches, loss)
    try:
        engine = build_engine(strategy, model)
    except ConfigError as error:
        return Sharded(reason=f"{error.what}: {error.found}")
    saved = compare_saved(engine, given)
    own = slice(rank * NUM_MICROBATCHES, (rank + 1) * NUM_MICROBATCHES)
    *first, last = batches[own]
    with engine.accumulating():
        losses = [_train(model, batch, loss, head) for batch in first]
    losses.append(_train(model, last, loss))
    engine.clip_grad_norm(0.0)
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
        saved=saved,
    )


def share_types(model_types: Iterable[str], method: ContextMethod) -> dict[str, Sharded]:
    """Try types one after the other, with the sequences shared. All ranks of the group call it."""
    torch.set_num_threads(1)
    layout = {"context": dist.get_world_size(), "context_method": method.value}
    strategy = make_strategy(**layout, global_batch_size=NUM_MICROBATCHES)
    return {model_type: share_type(model_type, strategy) for model_type in model_types}


def share_type(model_type: str, strategy: Strategy) -> Sharded:
    """Run micro batches of which each rank has a part of the tokens: of packed documents, padded, of tokens alone."""
    model = tiny_model(model_type)
    packed_ones, masked, alone = (tiny_batch(model, seed=seed) for seed in range(3))
    batches = [packed(packed_ones), padded(masked), {name: alone[name] for name in ("input_ids", "labels")}]
    try:
        engine = build_engine(strategy, copy.deepcopy(model))
    except ConfigError as error:
        return Sharded(reason=f"{error.what}: {error.found}")
    whole, saved = run_whole(model, batches), compare_saved(engine, model)
    hooks = TrainerHooks(model=engine.model, loss=_loss_of_share)
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
        saved=saved,
    )


def packed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tokens of a batch as two documents, whose first tokens are no targets."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    start = ids.shape[1] // 3
    positions[:, start:] -= start
    labels[:, start] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows that begin or end with padding, from which nothing is predicted: it attends to all tokens that there are."""
    mask = batch["attention_mask"].clone()
    mask[0, :3] = mask[1:, -5:] = 0
    labels = batch["labels"].clone()
    # Of codebooks each token has several.
    labels[mask == 0] = IGNORED
    labels[0, 3] = IGNORED
    return batch | {"attention_mask": mask, "labels": labels}


def _loss_of_share(model: torch.nn.Module, batch: dict[str, torch.Tensor], num_items: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, num_items_in_batch=num_items).loss
    return loss


def _train(model: PreTrainedModel, batch: Batch, loss: Loss, head: LossHead | None = None) -> float:
    with nullcontext() if head is None else head.deferring(model):
        found = loss(model, batch)
    found.backward()
    return found.item()
