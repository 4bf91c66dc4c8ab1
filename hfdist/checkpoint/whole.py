"""A check that all ranks together hold every element of a model, so that no checkpoint silently lacks some."""

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
    """Check that the ranks together hold whole copies of each tensor, by the number of elements. A collective.

    Args:
        weights: the pieces of weights that this rank holds, none of them twice.
        whole: shapes of the tensors by name, as the model had them before it was partitioned; equal on all ranks.
        packed: names of tensors that are held in another form, such as quantized ones: they count as whole.

    Raises:
        CheckpointError: of some tensor the ranks hold nothing, or parts that make no whole copies, or one that the
            model did not have; with the first names, and on all ranks alike.
    """
    if not whole or world_size() == 1 or is_planned():
        return
    # A tensor without elements counts as one element, so that it can be missing, too.
    totals = {name: max(1, math.prod(shape)) for name, shape in whole.items()}
    held = dict.fromkeys(totals, 0)

    def count() -> str:
        for piece in weights:
            shape = whole.get(piece.name)
            if shape is None or (piece.shape != shape and piece.name not in packed):
                what = "a rank holds a tensor that the model did not have when it was partitioned"
                allowed = None if shape is None else str(list(shape))
                raise CheckpointError(what, where=piece.name, found=str(list(piece.shape)), allowed=allowed)
            counts_as_whole = piece.name in packed or math.prod(shape) == 0
            held[piece.name] += totals[piece.name] if counts_as_whole else piece.view.numel()
        # The digest of the model, which must be the same on all ranks: their sums are added up in its order.
        return hashlib.sha256(json.dumps(list(whole.items())).encode()).hexdigest()

    if len(set(on_all_ranks(count))) > 1:
        what = "the ranks have partitioned different models"
        raise CheckpointError(what, where="model", hint="the same config and class on all ranks")
    sums = torch.tensor(list(held.values()), device=device_of(None))
    dist.all_reduce(sums)
    incomplete = [
        f"{name} ({found:,} of {total:,} elements)"
        for (name, total), found in zip(totals.items(), sums.tolist(), strict=True)
        if found == 0 or found % total != 0
    ]
    if incomplete:
        raise CheckpointError(
            "the ranks together do not hold the whole model, so no checkpoint could be written of it",
            where="strategy",
            found=f"{len(incomplete)} of {len(totals)} tensors: {list_first(incomplete)}",
            hint="another layout, such as strategy=fsdp2",
        )
