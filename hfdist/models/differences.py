"""How far two computations of the same values are from each other."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_FLOOR = 1e-2
"""Least divisor of a parameter's gradient, as a share of the largest element of all gradients."""


def largest_difference(
    wanted: torch.Tensor,
    found: torch.Tensor,
    wanted_gradients: Iterable[torch.Tensor],
    found_gradients: Iterable[torch.Tensor],
) -> float:
    """Give the largest difference of values and of gradients, each relative to its own largest element.

    Shapes are free, and the same on both sides. NaN where one of them is no number.
    """
    gradients = list(wanted_gradients)
    floor = _FLOOR * max(map(_largest, gradients), default=0.0)
    tiny = torch.finfo(torch.float32).tiny
    differences = [_largest(wanted - found) / max(_largest(wanted), tiny)]
    for one, other in zip(gradients, found_gradients, strict=True):
        differences.append(_largest(one - other) / max(_largest(one), floor, tiny))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max())


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
