"""What each shard of a parameter server has: parts of tensors, cut alike for any number of shards.

    12 Mi elements:   | 4 Mi | 4 Mi | 4 Mi |      1 shard has all three, 2 have two and one, 3 have one each

So a norm is the sum over the same parts for any number of shards. The optimizer sees parts of tensors. It must step
each element by itself: `find_slots` refuses the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import gather_json
from hfdist.config.islands import CUT_ELEMENTS
from hfdist.errors import ConfigError
from hfdist.islands.owned_pieces import share_out
from hfdist.islands.segment import Segment


def cut(pieces: Iterable[Piece]) -> list[Piece]:
    """Give parts of at most CUT_ELEMENTS elements, in order, with live views; runs of a piece stay whole."""
    parts = []
    for piece in pieces:
        # A piece that is one run is cut at any element.
        run, pitch = (piece.run, piece.pitch) if piece.run else (1, 1)
        num_runs = max(CUT_ELEMENTS // run, 1)
        for number, view in enumerate(piece.view.detach().view(-1).split(num_runs * run)):
            parts.append(replace(piece, start=piece.start + number * num_runs * pitch, view=view))
    return parts


def cut_values(pieces: Iterable[Piece], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Give flat live views of the values of each piece, cut as the pieces are."""
    return [part.view for part in cut(replace(piece, view=value) for piece, value in zip(pieces, values, strict=True))]


def share_out_parts(parts: Sequence[Piece], num_shards: int) -> list[list[int]]:
    """Give the indices, in `parts`, of those that each shard has. A collective.

    Ranks that hold the same part send it to the same shard, which counts it once in the norm.

    Raises:
        ConfigError: there are more shards than parts.
    """
    if num_shards == 1:
        return [list(range(len(parts)))]
    own = [Segment.of(part) for part in parts]
    loads: Counter[Segment] = Counter()
    for of_rank in gather_json(own):
        for name, shape, *numbers in of_rank:
            segment = Segment(name, tuple(shape), *numbers)
            loads[segment] += segment.num_elements
    if len(loads) < num_shards:
        what, allowed = "the server has more shards than there are parts of trained tensors", f"1 to {len(loads)}"
        raise ConfigError(what, where="islands.server_shards", found=num_shards, allowed=allowed)
    segments = sorted(loads)
    shard_of = dict(zip(segments, share_out([loads[one] for one in segments], num_shards), strict=True))
    return [[index for index, one in enumerate(own) if shard_of[one] == shard] for shard in range(num_shards)]
