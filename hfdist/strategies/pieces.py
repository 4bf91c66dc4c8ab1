"""Pieces of a model whose parameters are held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.models.partitioning import whole_shape
from hfdist.strategies.optimizer_state import StateReader


def list_pieces(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    skips_state: Callable[[torch.Tensor], bool] = lambda _: False,
) -> Iterator[Piece]:
    """List weights, persistent buffers and optimizer state, all whole; tied weights once, under their first name.

    State that the optimizer has not made yet is made first, as zeros, where its first step would do so. Without an
    optimizer there are weights only. Neither has wrappers. `skips_state` says of which parameters no state is listed.

    Raises:
        CheckpointError: an optimizer that keeps what is neither a number nor a tensor.
    """
    reader = None if optimizer is None else StateReader(optimizer)
    param_groups = [] if optimizer is None else optimizer.param_groups
    groups = {id(parameter): group for group in param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        yield Piece(name=name, key=WEIGHT, shape=shape, start=0, view=parameter.detach())
        group = groups.get(id(parameter))
        is_stepped = group is not None and parameter.requires_grad and parameter.numel() > 0
        if reader is not None and group is not None and is_stepped and not skips_state(parameter):
            yield from reader.pieces_of(name, group, parameter)
    yield from list_buffers(model)


def list_buffers(model: nn.Module) -> Iterator[Piece]:
    """List the buffers that belong to the model's state dict; every layout holds them whole."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield Piece(name=name, key=WEIGHT, shape=tuple(buffer.shape), start=0, view=buffer)


def list_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Give the whole shape of all that `list_pieces` lists of a whole model without an optimizer, by name."""
    # ZeRO-3 partitions parameters while the model is made.
    shapes = {name: whole_shape(p) for name, p in model.named_parameters()}
    return shapes | {piece.name: piece.shape for piece in list_buffers(model)}
