"""Losses of a head by other packages, for GPUs: liger-kernel and cut-cross-entropy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hfdist.config.model import Loss
from hfdist.models.loss.lazy_logits import Apply, Cast, Rows

PACKAGES = {Loss.liger: "liger_kernel", Loss.cut_cross_entropy: "cut_cross_entropy"}


def is_installed(choice: Loss) -> bool:
    """Whether the package is there; it is imported at first use, since that takes seconds."""
    return find_spec(PACKAGES[choice]) is not None


def refuse_rows(choice: Loss, rows: Rows) -> str | None:
    """Say what of this loss the package does not compute; None: it computes all."""
    module: Any = rows.head.module
    if type(module) is not nn.Linear:
        return f"the head is a {type(module).__name__}"
    if _softcap(rows) is None:
        return "the model does more to its logits than to cap them"
    if choice is not Loss.cut_cross_entropy:
        return None
    if module.bias is not None:
        return "the head has a bias"
    return "labels are smoothed" if rows.label_smoothing != 0.0 else None


def liger(rows: Rows) -> torch.Tensor:
    """By liger-kernel's own chunks; gradients of the weight are summed in float32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, weight, bias = _operands(rows)
    # Positional, as autograd's functions have it: ... label_smoothing, reduction, softcap, return_z_loss, accum_dtype.
    smoothing = rows.label_smoothing
    given = (hidden, weight, rows.targets, bias, None, rows.ignore_index, 0.0, smoothing, "sum", _softcap(rows) or None)
    total: Any = LigerFusedLinearCrossEntropyFunction.apply(*given, False, torch.float32)
    return total[0] if isinstance(total, tuple) else total


def cut_cross_entropy(rows: Rows) -> torch.Tensor:
    """Without any logits in memory. Small gradients are not left out, as they are by the package's own default."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight, _ = _operands(rows)
    total: torch.Tensor = linear_cross_entropy(
        hidden,
        weight,
        rows.targets,
        ignore_index=rows.ignore_index,
        softcap=_softcap(rows) or None,
        reduction="sum",
        filter_eps=None,
    )
    return total


def _operands(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """In the type of the arithmetic; their gradients go back to the parameters' own."""
    module: Any = rows.head.module
    kind = rows.hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.hidden.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return rows.hidden.to(dtype), module.weight.to(dtype), bias


def _softcap(rows: Rows) -> float | None:
    """The cap of the logits, 0 where there is none; None: something else is done to them."""
    steps = [step for step in rows.per_row if not isinstance(step, Cast)]
    match steps:
        case []:
            return 0.0
        case [Apply(torch.div, (cap,)), Apply(torch.tanh, ()), Apply(torch.mul, (same,))]:
            return float(cap) if isinstance(cap, (int, float)) and cap == same else None
    return None
