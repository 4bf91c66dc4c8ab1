"""The buckets through which DeepSpeed's gradients go, and what they leave on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hfdist.models.partitioning import whole_shape

if TYPE_CHECKING:
    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer

BUCKET_ELEMENTS = 50_000_000
"""Elements of a bucket: as fast as DeepSpeed's 500M on one node, at a tenth of the memory; small models have fewer."""
_ALIGNED = 2
"""Elements to which DeepSpeed aligns each rank's part of a flat buffer."""


def bucket_elements(trained: float, largest: float, most: int = BUCKET_ELEMENTS) -> int:
    """Give the elements of a bucket: two of them hold all gradients, and each the largest one.

    Args:
        trained: elements that are trained.
        largest: elements of the largest parameter.
        most: elements of a bucket that the config asks for.
    """
    return max(1, min(most, math.ceil(max(trained / 2, largest))))


def fit_buckets(zero: ZeroOptimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Make the buckets of a ZeRO optimizer no larger than the gradients can fill, before the first backward.

    DeepSpeed allocates one or two of the configured size, however small the model is. How large they are changes when
    gradients are reduced, and not what comes out. Its config is read before the model is known, so its fields are set.
    ZeRO-1 of bfloat16 has no buckets.
    """
    if not hasattr(zero, "ipg_buckets"):
        return
    sizes = [math.prod(whole_shape(parameter)) for parameter in parameters if parameter.requires_grad]
    zero.reduce_bucket_size = bucket_elements(sum(sizes), max(sizes), zero.reduce_bucket_size)
    for bucket in zero.ipg_buckets.values():
        # ZeRO-3 has made its own already; the others have lists, which each backward fills.
        if isinstance(bucket.buffer, torch.Tensor):
            bucket.buffer = bucket.buffer.new_empty(zero.reduce_bucket_size)


def rank_with_most_gradients(groups: Iterable[Sequence[int]], ranks: int) -> int:
    """Give the rank that keeps most gradients under ZeRO-1 and 2 in float32.

    Each rank steps an even part of a flat buffer, and keeps whole the gradients in which its part begins or ends.

    Args:
        groups: elements of each parameter, in order, by parameter group of the optimizer.
        ranks: number of ranks that share the state.
    """
    kept = [0] * ranks
    for sizes in groups:
        part = _ALIGNED * max(1, math.ceil(sum(sizes) / (_ALIGNED * ranks)))
        start = 0
        for size in sizes:
            for rank in range(start // part, (start + size - 1) // part + 1):
                kept[rank] += size
            start += size
    return kept.index(max(kept))
