"""Numbers as islands exchange them: flat, in float32, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def to_host(view: torch.Tensor) -> torch.Tensor:
    """Give a flat copy of a tensor, in float32 on the CPU."""
    return view.detach().reshape(-1).float().cpu()


def join(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Give one vector of all elements; without vectors it has none."""
    return torch.cat([torch.empty(0), *vectors])


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all numbers of a vector are finite."""
    # The sum is quick; it may overflow where all numbers are finite.
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())
