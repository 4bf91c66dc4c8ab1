"""Pieces of a model whose parameters are held whole, and of its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.strategies.optimizer_state import StateReader


def list_pieces(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    """List weights, persistent buffers and optimizer state, all whole; tied weights once, under their first name.

    State that the optimizer has not made yet is made first, as zeros, where its first step would do so.

    Args:
        model: the Hugging Face model, without wrappers.
        optimizer: without wrappers; None: not made yet, so there are weights only.

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
        if reader is not None and group is not None and parameter.requires_grad and parameter.numel() > 0:
            kept = reader.kept_for(group, parameter)
            yield from kept.numbers_of(name)
            for key, value in kept.tensors.items():
                yield Piece(name=name, key=key, shape=tuple(value.shape), start=0, view=value)
    yield from list_buffers(model)


def list_buffers(model: nn.Module) -> Iterator[Piece]:
    """List the buffers that belong to the model's state dict; every layout holds them whole."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield Piece(name=name, key=WEIGHT, shape=tuple(buffer.shape), start=0, view=buffer)
