"""Greedy continuations of prompts that all ranks have; each data rank continues a share of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfdist.strategies.engine import Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import continue_rows, exchange
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages


def continue_prompts(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: GenerationLimits,
    *,
    topology: Topology,
    rows_at_once: int,
    uses_cache: bool = False,
    images: RowImages | None = None,
) -> list[list[int]]:
    """Give each prompt's continuation without the token that ended it, on all ranks. All ranks call it.

    The beginning of a prompt that is too long for the model is left out. A forward continues at most `rows_at_once` of
    each data rank. `images` are those of the prompts; None: the run has none.
    """
    if not prompts:
        return []
    share = -(-len(prompts) // topology.data)
    places = range(topology.data_rank * share, (topology.data_rank + 1) * share)
    # Copies of the first one fill up the shares to equal sizes.
    own = [place if place < len(prompts) else 0 for place in places]
    written = continue_rows(
        [prompts[place] for place in own],
        forward,
        limits,
        images=None if images is None else RowImages(images.tokens, [images.rows[place] for place in own]),
        topology=topology,
        rows_at_once=rows_at_once,
        uses_cache=uses_cache,
    )
    padded = torch.tensor([tokens + [-1] * (limits.max_new_tokens - len(tokens)) for tokens in written])
    everyones = exchange([padded], share, limits.max_new_tokens, topology).flatten(0, 1)
    return [
        [token for token in tokens if token >= 0 and token not in limits.end_ids]
        for tokens in everyones[: len(prompts)].tolist()
    ]
