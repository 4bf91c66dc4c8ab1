"""Pieces of a model that every rank holds whole, and what Adam keeps for each parameter in any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.errors import CheckpointError


def list_pieces(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    """List weights, persistent buffers and optimizer state, all whole; tied weights once, under their first name.

    State that the optimizer has not made yet is made first, as zeros, which is what its first step would do.

    Args:
        model: the Hugging Face model, without wrappers.
        optimizer: torch's own Adam or AdamW, without wrappers; None: not made yet, so there are weights only.

    Raises:
        CheckpointError: another optimizer.
    """
    param_groups = [] if optimizer is None else optimizer.param_groups
    groups = {id(parameter): group for group in param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        yield Piece(name=name, key=WEIGHT, shape=shape, start=0, view=parameter.detach())
        group = groups.get(id(parameter))
        if optimizer is not None and group is not None and parameter.requires_grad and parameter.numel() > 0:
            state = prepare_state(optimizer, group, parameter)
            yield Piece(name=name, key=STEP, shape=(), start=0, view=state[STEP])
            for key, value in elementwise(state, parameter).items():
                yield Piece(name=name, key=key, shape=shape, start=0, view=value)
    yield from list_buffers(model)


def list_buffers(model: nn.Module) -> Iterator[Piece]:
    """List the buffers that belong to the model's state dict; every layout holds them whole."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield Piece(name=name, key=WEIGHT, shape=tuple(buffer.shape), start=0, view=buffer)


def prepare_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Give Adam's state of one parameter, or flat buffer of parameters; where there is none yet, make it.

    Adam takes a state of zeros at step 0 for a parameter that it has never stepped.

    Args:
        optimizer: torch's Adam or AdamW.
        group: the parameter's group, whose options say which state Adam keeps, and where.
        parameter: what the optimizer steps.

    Raises:
        CheckpointError: another optimizer.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        raise CheckpointError(
            "the state of this optimizer cannot be saved by parameter name",
            where="optimizer",
            found=type(optimizer).__name__,
            allowed="torch.optim.AdamW or torch.optim.Adam",
            hint="TrainingArguments(optim='adamw_torch')",
        )
    state = optimizer.state[parameter]
    if len(state) == 0:
        # On the host unless the kernel reads it: the same choice as Adam's.
        is_on_device = group["capturable"] or group["fused"]
        state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device if is_on_device else "cpu")
        keys = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        for key in keys:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
    return state


def elementwise(state: dict[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a state that have one number for each element of the parameter, by key."""
    return {key: value for key, value in state.items() if key != STEP and value.numel() == parameter.numel()}
