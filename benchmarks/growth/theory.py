"""What growth should be: bytes by the formulas of the layouts, and exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping

_ITEM_BYTES = 4
"""All is float32."""
_TIMES_PARAMETERS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "zero3, nothing kept": 3}
"""How often the parameters travel in a step of one micro batch. ZeRO-3 gathers them for the forward and again for the
backward, but for what it may keep in between: up to 1e9 elements unless told otherwise, so all of a small model."""


def sent_bytes(name: str, num_ranks: int, num_parameters: int, activation_bytes: int) -> float:
    """Bytes that a rank sends in a step, on average over the ranks.

    Args:
        name: of the layout.
        num_ranks: in all.
        num_parameters: of the whole model.
        activation_bytes: hidden states of the whole global batch.
    """
    if name in _TIMES_PARAMETERS:
        return _TIMES_PARAMETERS[name] * (num_ranks - 1) / num_ranks * num_parameters * _ITEM_BYTES
    num_replicas = 1 if name == "pipeline" else min(num_ranks, 2)
    num_stages = num_ranks // num_replicas
    # Each boundary of each replica is crossed forward and backward by its share of the batch.
    crossing = 2 * (num_stages - 1) * activation_bytes / num_ranks
    return crossing + 2 * (num_replicas - 1) / num_replicas * num_parameters * _ITEM_BYTES / num_stages


def state_bytes(name: str, num_ranks: int, num_parameters: int, num_small_parameters: int) -> float:
    """Weights and what the optimizer holds between steps, on average over the ranks.

    Adam has two moments. DeepSpeed steps a float32 copy of a rank's share beside the weights that the model computes
    with, though these are float32, too.
    """
    whole = num_parameters * _ITEM_BYTES
    if num_ranks == 1 or name == "ddp":
        return 3 * whole
    if name in ("zero1", "zero2"):
        return whole + 3 * whole / num_ranks
    if name == "zero3":
        # Beside the shares of small ones, the whole.
        return 4 * whole / num_ranks + num_small_parameters * _ITEM_BYTES
    if name.startswith("zero3"):
        return 4 * whole / num_ranks
    if name == "pipeline":
        return 3 * whole / num_ranks
    return whole / (num_ranks // 2) + 3 * whole / num_ranks


def exponent(costs: Mapping[int, float]) -> float:
    """Slope of a straight line through the logarithms: 0: flat, 1: linear."""
    xs, ys = [math.log(x) for x in costs], [math.log(max(y, 1e-12)) for y in costs.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - mean_x) ** 2 for x in xs)
