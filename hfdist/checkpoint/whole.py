"""Whether the ranks together hold every element of the whole model: a file that lacks one would be silently another."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import device_of, is_planned, on_all_ranks, world_size
from hfdist.errors import CheckpointError
from hfdist.units import list_first


def check_holds_whole(
    weights: Iterable[Piece], whole: Mapping[str, tuple[int, ...]], packed: Collection[str] = ()
) -> None:
    """Count the elements that all ranks hold of each tensor. A collective, of a number a tensor.

    Args:
        weights: what this rank holds; of one tensor no element twice.
        whole: shapes by name, as the model had them before it was partitioned; equal on all ranks.
        packed: names of tensors that are held in another form than that of `whole`.

    Raises:
        CheckpointError: ranks hold nothing of a tensor, not each element equally often, or what the model did not
            have; with the first names, and on all ranks alike.
    """
    if not whole or world_size() == 1 or is_planned():
        return
    totals = {name: max(1, math.prod(shape)) for name, shape in whole.items()}
    held = dict.fromkeys(totals, 0)

    def count() -> str:
        for piece in weights:
            shape = whole.get(piece.name)
            if shape is None or (piece.shape != shape and piece.name not in packed):
                what = "a rank holds a tensor that the model did not have when it was partitioned"
                allowed = None if shape is None else str(list(shape))
                raise CheckpointError(what, where=piece.name, found=str(list(piece.shape)), allowed=allowed)
            is_counted = piece.name not in packed and math.prod(shape) > 0
            held[piece.name] += piece.view.numel() if is_counted else totals[piece.name]
        return hashlib.sha256(json.dumps(list(whole.items())).encode()).hexdigest()

    if len(set(on_all_ranks(count))) > 1:
        what = "the ranks have partitioned different models"
        raise CheckpointError(what, where="model", hint="the same config and class on all ranks")
    sums = torch.tensor(list(held.values()), device=device_of(None))
    dist.all_reduce(sums)
    # Each layout has whole copies, or parts that make such.
    gone = [
        f"{name} ({found:,} of {total:,} elements)"
        for (name, total), found in zip(totals.items(), sums.tolist(), strict=True)
        if found == 0 or found % total
    ]
    if gone:
        raise CheckpointError(
            "the ranks together do not hold the whole model, so no checkpoint could be written of it",
            where="strategy",
            found=f"{len(gone)} of {len(totals)} tensors: {list_first(gone)}",
            hint="another layout, such as strategy=fsdp2",
        )
