"""Try a plan before training: a small model of the class, cut over real ranks, beside the same model whole.

Plans come with transformers for over a hundred types, and some do not compute what the whole model does, silently.
Loss and every gradient are compared over two accumulated micro batches.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.collectives import gather_json
from hfdist.errors import ConfigError, first_line
from hfdist.models.probing import small_model
from hfdist.strategies.tensor_cut import cut_model, make_plan
from hfdist.strategies.tensor_engine import TensorEngine

LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
"""Largest relative differences. Sums of other orders make up to 4e-5 in a gradient of recurrent types, which in float64
differ by 1e-15; plans that are wrong make 1e-2 and more."""

_NUM_MICROBATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest relative differences from the whole model."""

    loss: float
    gradient: float
    worst_parameter: str
    first_wrong: str
    """The first parameter, in the order of the model, whose gradient differs by more than the bound."""


def check_plan(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Refuse a type of model that does not train over tensor ranks as it does whole. A collective over all ranks.

    Args:
        model: whole.
        mesh: of the layout.

    Raises:
        ConfigError: naming the first wrong parameter; on all ranks alike.
    """
    problem = None
    pairs = _mesh_of_pairs(mesh)
    if pairs.get_coordinate() is not None:
        try:
            found = compare_small(model, pairs)
        except Exception as error:  # whatever a model raises that cannot be made small, or is not made for its plan
            problem = f"it cannot be tried: {first_line(error)}"
        else:
            if not (found.loss <= LOSS_BOUND and found.gradient <= GRADIENT_BOUND):
                where = found.first_wrong or "no parameter"
                differences = f"the loss differs by {found.loss:.0e}, gradients by up to {found.gradient:.0e}"
                problem = f"{differences}; the first that is wrong: {where}"
    problems = [problem for problem in gather_json(problem) if problem is not None]
    if problems:
        raise ConfigError(
            "this type of model does not train over tensor ranks as it does on one process",
            where="strategy.tensor",
            found=f"{model.config.model_type}, made small: {problems[0]}",
            hint="strategy.tensor=1; strategy=fsdp2 shards any model",
        )


def _mesh_of_pairs(mesh: DeviceMesh) -> DeviceMesh:
    """Give the first two ranks of each tensor group: what is small can be cut in two. A collective."""
    ranks = mesh.mesh.reshape(-1, mesh.size(mesh.mesh_dim_names.index("tensor")))[:, :2]  # type: ignore[union-attr]
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("data", "tensor"))


def compare_small(model: PreTrainedModel, mesh: DeviceMesh) -> Differences:
    """Make a small model of the class, and train it whole and cut. All ranks of the mesh call it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = small_model(model)
        nn.Module.to(small, mesh.device_type)
        with torch.no_grad():
            for parameter in small.parameters():
                # Else ones and zeros, as of norms and biases, would hide what is wrong.
                parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.device))
    cut = copy.deepcopy(small)
    whole_loss = _train(small)
    plan = make_plan(cut, mesh.size(1))
    engine = TensorEngine(cut, mesh, cut_model(cut, mesh["tensor"], plan), plan.partial)
    loss = _train(cut)
    engine.clip_grad_norm(0.0, lambda: None)
    return _compare(engine, small, abs(loss - whole_loss) / abs(whole_loss))


def _train(model: PreTrainedModel) -> float:
    total = 0.0
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for seed in range(_NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(min(vocabulary, 100), (2, 16), generator=generator).to(model.device)
        labels = tokens.clone()
        labels[0, 4:7] = -100
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        total += float(loss.detach())
    return total


def _compare(engine: TensorEngine, whole: nn.Module, loss: float) -> Differences:
    """Compare this rank's part of each gradient with that part of the whole one's."""
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    found: list[tuple[float, str]] = []
    for name, parameter in engine.model.named_parameters():
        reference, own = gradients[name], parameter.grad
        if reference is None or own is None:
            found.append((0.0 if reference is own else math.inf, name))
            continue
        pieces = engine.own_pieces(Piece(name=name, key=WEIGHT, shape=tuple(own.shape), start=0, view=own))
        squared: Any = sum((piece.view - piece.of_whole(reference)).norm() ** 2 for piece in pieces)
        # A gradient of nothing but rounding has no norm to compare with.
        found.append((float(squared.sqrt() / (reference.norm() + 1e-7)), name))
    worst, name = max(found, key=lambda item: (math.isnan(item[0]), item[0]))
    first = next((name for difference, name in found if not difference <= GRADIENT_BOUND), "")
    return Differences(loss=loss, gradient=worst, worst_parameter=name, first_wrong=first)
