"""How tensors are cut into parts, and which parts each shard of a parameter server has.

Tensors are cut in the same places for any number of shards:

    12 Mi elements:   | 4 Mi | 4 Mi | 4 Mi |      1 shard has all three, 2 have two and one, 3 have one each

So the norm of the gradients is a sum over the same parts for any number of shards. The optimizer of a shard sees parts
of tensors, so only an optimizer that steps each element by itself can be used.
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
    """Cut pieces into parts of at most CUT_ELEMENTS elements.

    A run of elements is never cut where a piece is several runs; a longer run is a part of its own.

    Returns:
        The parts in order, as pieces with flat live views.
    """
    parts = []
    for piece in pieces:
        run, pitch = piece.run, piece.pitch
        if run == 0:
            # The whole piece is one run, and may be cut at each element.
            run, pitch = 1, 1
        runs_per_part = max(CUT_ELEMENTS // run, 1)
        for number, view in enumerate(piece.view.detach().view(-1).split(runs_per_part * run)):
            start = piece.start + number * runs_per_part * pitch
            parts.append(replace(piece, start=start, view=view))
    return parts


def cut_values(pieces: Iterable[Piece], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Cut other values of the same pieces, such as an optimizer's state, in the same places; give flat live views."""
    with_values = (replace(piece, view=value) for piece, value in zip(pieces, values, strict=True))
    return [part.view for part in cut(with_values)]


def share_out_parts(parts: Sequence[Piece], num_shards: int) -> list[list[int]]:
    """Choose a shard for each part, so that all shards have about as many elements. A collective.

    Ranks that hold the same part send it to the same shard, which counts it once in the norm.

    Returns:
        For each shard, the indices of this rank's `parts` that it has.

    Raises:
        ConfigError: there are more shards than parts.
    """
    if num_shards == 1:
        return [list(range(len(parts)))]
    own = [Segment.of(part) for part in parts]
    # A part that several ranks hold is sent by each of them.
    loads: Counter[Segment] = Counter()
    for of_rank in gather_json(own):
        for name, shape, *numbers in of_rank:
            segment = Segment(name, tuple(shape), *numbers)
            loads[segment] += segment.num_elements
    if len(loads) < num_shards:
        what, allowed = "the server has more shards than there are parts of trained tensors", f"1 to {len(loads)}"
        raise ConfigError(what, where="islands.server_shards", found=num_shards, allowed=allowed)
    # In one order, so that all ranks choose alike.
    segments = sorted(loads)
    shards = share_out([loads[segment] for segment in segments], num_shards)
    shard_of = dict(zip(segments, shards, strict=True))
    indices: list[list[int]] = [[] for _ in range(num_shards)]
    for index, segment in enumerate(own):
        indices[shard_of[segment]].append(index)
    return indices
