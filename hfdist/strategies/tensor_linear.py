"""Linear layers of a tensor plan on plain tensors.

They compute what transformers' styles compute with DTensors, whose dispatch took a quarter of the CPU time of a small
Llama's step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

STYLES = ("colwise", "rowwise")
"""Rows of the weight on each rank: the input is whole, the output this rank's part. Columns: the other way round."""


class _SumGradient(torch.autograd.Function):
    """Give what each rank uses for its own part: the gradient of the whole is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        [gradient] = gradients
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Add up what the ranks have computed, in place; all ranks use the sum alike, so each has its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(value)
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def run_locally(module: nn.Linear, style: str, group: dist.ProcessGroup) -> None:
    """Let a layer that has only its rank's part of the weight give what `style` says, one of `STYLES`."""

    def colwise(value: torch.Tensor) -> torch.Tensor:
        return functional.linear(_SumGradient.apply(value, group), module.weight, module.bias)

    def rowwise(value: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _Sum.apply(functional.linear(value, module.weight), group)
        return total if module.bias is None else total + module.bias

    module.forward = {"colwise": colwise, "rowwise": rowwise}[style]  # type: ignore[method-assign, assignment]
