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
    """Give the largest difference between two computations, relative to the largest element of each tensor.

    Args:
        wanted: the values that are right, of any shape.
        found: the values of the other computation, of the same shape.
        wanted_gradients: the gradients that are right, of any shapes.
        found_gradients: the gradients of the other computation, in the same order.

    Returns:
        The largest relative difference of all; NaN if any element is NaN.
    """
    gradients = list(wanted_gradients)
    floor = _FLOOR * max(map(_largest, gradients), default=0.0)
    tiny = torch.finfo(torch.float32).tiny
    differences = [_largest(wanted - found) / max(_largest(wanted), tiny)]
    for right, other in zip(gradients, found_gradients, strict=True):
        differences.append(_largest(right - other) / max(_largest(right), floor, tiny))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max())


def _largest(tensor: torch.Tensor) -> float:
    """Give the largest magnitude of an element; 0: there is none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
