"""What each shard of a parameter server has: parts of tensors, cut alike for any number of shards.

    12 Mi elements:   | 4 Mi | 4 Mi | 4 Mi |      1 shard has all three, 2 have two and one, 3 have one each

So a norm is the sum over the same parts for any number of shards. Each element is stepped by itself, so that the
optimizer may see any part of a tensor: `find_slots` refuses the others.
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
from hfdist.islands.owned_pieces import place_of, share_out


def cut(pieces: Iterable[Piece]) -> list[Piece]:
    """Give parts of at most CUT_ELEMENTS elements, in order, with live views; runs of a piece stay whole."""
    parts = []
    for piece in pieces:
        flat, run = piece.view.detach().view(-1), piece.run or 1
        most = max(CUT_ELEMENTS // run, 1) * run
        for place, view in enumerate(flat.split(most)):
            start = piece.start + place * most // run * (piece.pitch if piece.run else 1)
            parts.append(replace(piece, start=start, view=view))
    return parts


def cut_values(pieces: Iterable[Piece], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Give live views of values of each piece, cut as the pieces are; each is flat."""
    return [part.view for part in cut(replace(piece, view=value) for piece, value in zip(pieces, values, strict=True))]


def share_out_parts(parts: Sequence[Piece], num_shards: int) -> list[list[int]]:
    """Give the places in `parts` of what each shard has. A collective.

    Ranks that hold the same part send it to the same shard, which counts it once in the norm.

    Raises:
        ConfigError: there are more shards than parts.
    """
    if num_shards == 1:
        return [list(range(len(parts)))]
    own = [f"{place_of(part)}" for part in parts]
    loads: Counter[str] = Counter()
    for told in gather_json([[name, part.view.numel()] for name, part in zip(own, parts, strict=True)]):
        for name, size in told:
            loads[name] += size
    if len(loads) < num_shards:
        what, allowed = "the server has more shards than there are parts of trained tensors", f"1 to {len(loads)}"
        raise ConfigError(what, where="islands.server_shards", found=num_shards, allowed=allowed)
    names = sorted(loads)
    shard_of = dict(zip(names, share_out([loads[name] for name in names], num_shards), strict=True))
    return [[place for place, name in enumerate(own) if shard_of[name] == shard] for shard in range(num_shards)]
