"""Numbers as islands exchange them: flat, in float32, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def to_cpu_vector(view: torch.Tensor) -> torch.Tensor:
    """Give a tensor in the form of exchanges; one that has it already shares its memory with what is given."""
    return view.detach().reshape(-1).float().cpu()


def join_vectors(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Put vectors end to end; without any, the result has no element."""
    return torch.cat([torch.empty(0), *vectors])


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all numbers of a vector are finite."""
    # The sum is quick; it may overflow where all numbers are finite.
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())
