"""Greedy continuations of prompts that all ranks have; each data rank continues a share of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfdist.strategies.engine import Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import continue_rows
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.shares import join_shares, share_of_rank


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
    each data rank. `images` are those of this rank's `share_of_rank` of the prompts; None: the run has none.
    """
    if not prompts:
        return []
    written = continue_rows(
        share_of_rank(prompts, topology),
        forward,
        limits,
        images=images,
        topology=topology,
        rows_at_once=rows_at_once,
        uses_cache=uses_cache,
    )
    padded = torch.tensor([tokens + [-1] * (limits.max_new_tokens - len(tokens)) for tokens in written])
    return join_shares([padded], len(prompts), limits, topology)
