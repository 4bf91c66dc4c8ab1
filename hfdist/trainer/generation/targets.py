"""Greedy targets of sources, by an encoder-decoder in the layout that trains; each data rank writes a share of them.

Each token takes a forward of the whole model, as in training: all ranks take equally many, whatever shards the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.models.target_loss import pad_pairs
from hfdist.strategies.engine import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.shares import join_shares, share_of_rank

_READ = "read"
"""Key in a batch: what a decoder has before the next token; shape [rows, tokens]."""


def write_targets(
    sources: Sequence[Sequence[int]],
    forward: Forward,
    limits: GenerationLimits,
    *,
    model: PreTrainedModel,
    topology: Topology,
    rows_at_once: int,
) -> list[list[int]]:
    """Give the greedy target of each source without the token that ended it, on all ranks. All ranks call it.

    Args:
        sources: token ids, the same on all ranks; the end of one that is too long for the encoder is left out.
        forward: runs forwards in the layout.
        limits: says at which token or length a target ends.
        model: says how a target begins.
        topology: the place of this rank.
        rows_at_once: the most rows of this data rank in a forward.
    """
    if not sources:
        return []
    share = [list(source)[: limits.most_tokens] for source in share_of_rank(sources, topology)]
    parts = [
        _write(share[start : start + rows_at_once], forward, limits, _beginning(model))
        for start in range(0, len(share), rows_at_once)
    ]
    return join_shares(parts, len(sources), limits, topology)


def _beginning(model: PreTrainedModel) -> list[int]:
    """Give what a decoder reads first: the start of a target, and the language of models that need it."""
    generation: Any = model.generation_config
    forced = generation.forced_bos_token_id
    return [int(generation.decoder_start_token_id), *([] if forced is None else [int(forced)])]


def _write(sources: list[list[int]], forward: Forward, limits: GenerationLimits, beginning: list[int]) -> torch.Tensor:
    """Give the tokens of some rows, -1 after their end; shape [rows, max_new_tokens]. A collective."""
    nothing = torch.empty(0, dtype=torch.long)
    batch = pad_pairs([[torch.tensor(source), nothing] for source in sources])
    del batch["labels"]
    read, ends = torch.tensor([beginning] * len(sources)), torch.tensor(sorted(limits.end_ids))
    written = torch.empty(len(sources), 0, dtype=torch.long)
    has_ended = torch.zeros(len(sources), dtype=torch.bool)
    for _ in range(limits.max_new_tokens):
        [likeliest] = forward(batch | {_READ: read}, _next_tokens)
        chosen = likeliest.cpu().where(~has_ended, -1)
        written = torch.cat([written, chosen[:, None]], 1)
        # A row that has ended reads on what is left out.
        read = torch.cat([read, chosen.clamp(min=0)[:, None]], 1)
        has_ended |= torch.isin(chosen, ends)
        if all(gather_json(bool(has_ended.all()))):
            break
    return nn.functional.pad(written, (0, limits.max_new_tokens - written.shape[1]), value=-1)


def _next_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Give the likeliest next token of each row; shape [rows]."""
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits: torch.Tensor = model(**inputs, decoder_input_ids=batch[_READ], use_cache=False).logits
    return logits[:, -1].argmax(-1)
