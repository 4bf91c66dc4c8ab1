"""Where a plain or data-parallel model keeps its pieces: every tensor whole, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hfdist.checkpoint.piece import STEP, WEIGHT, Piece

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, besides the step count."""


def list_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Every parameter, persistent buffer and moment of `model`, tied parameters once.

    Moments that do not exist yet, before the first step, are made: there must be something to read into.
    """
    pieces = [whole(name, WEIGHT, tensor) for name, tensor in named_buffers(model)]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        pieces.append(whole(name, WEIGHT, parameter.data))
        if id(parameter) in trained:
            state = optimizer.state[parameter]
            make_state(state, parameter)
            pieces += [whole(name, key, state[key]) for key in (*MOMENTS, STEP)]
    return pieces


def make_state(state: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    """Make AdamW's state of a parameter as its first step would, unless it is there."""
    if not state:
        # On the parameter's device, which the fused kernel wants.
        state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the weights; rotary tables and the like are made anew at loading."""
    saved = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def whole(name: str, key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that this rank holds from its first to its last element."""
    return Piece(name=name, key=key, shape=tuple(tensor.shape), start=0, view=tensor.detach())
