"""Whether a small model of a class gives the same logits with a cache as without one.

A mistake for one family of models would be samples of another distribution, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hfdist.errors import first_line
from hfdist.models.document_attention import dense_name
from hfdist.models.probing import small_model
from hfdist.models.slot_cache import SlotCache, next_logits

BOUND = 1e-5
"""The largest difference of logits that is allowed, relative to the largest one: rounding differs."""

_PADDING = 0, 3, 5
_NUM_TOKENS, _NUM_NEW_TOKENS = 7, 9
"""Tokens of the longest prompt, the tokens that pad each row, and new ones: windows of small models end among them.

Not more: at 17 tokens small models of Phi-3 begin to rotate otherwise, with a cache only the new keys.
"""
_ENTERS, _LEAVES = 3, 6
"""New tokens after which the last row enters, and the first one leaves."""


def find_cache_problem(
    model: PreTrainedModel, act: Callable[[PreTrainedModel], Any] = lambda small: small
) -> str | None:
    """Say why a cache whose rows come and go is none for models of this class; None: it is one.

    It takes a second or less, and needs no other rank.

    Args:
        model: any, of which the class and the config are read.
        act: gives what acts as the small model.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            difference = _compare(model, act)
    except Exception as error:  # whatever a model raises that cannot be made small, or split, or has no such cache
        return f"a small model of it cannot be tried: {first_line(error)}"
    # The comparison stands this way around, since a difference of NaN is no agreement.
    return None if difference <= BOUND else f"logits differ by {difference:.0e}"


def _compare(model: PreTrainedModel, act: Callable[[PreTrainedModel], Any]) -> float:
    small = small_model(model)
    if dense_name(model.config._attn_implementation) == "sdpa":
        small.set_attn_implementation("sdpa")
    for parameter in small.parameters():
        # Else rounding would hide what is wrong.
        parameter.add_(0.1 * torch.randn(parameter.shape))
    vocab_size = small.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (len(_PADDING), _NUM_TOKENS + _NUM_NEW_TOKENS))
    found = _write(act(small), tokens)
    differences, largest = [], []
    for row, padding in enumerate(_PADDING):
        without_cache: Any = small(input_ids=tokens[row : row + 1, padding:])
        wanted = without_cache.logits[0, _NUM_TOKENS - padding - 1 :][: len(found[row])]
        differences.append(float((torch.stack(found[row]) - wanted).abs().max()))
        largest.append(float(wanted.abs().max()))
    # NaN wherever it is: `max` would pass over it.
    return float(torch.tensor(differences).max()) / max(largest)


def _write(model: Any, tokens: torch.Tensor) -> list[list[torch.Tensor]]:
    """Give the logits of each new token of each row; rows begin, enter and leave at different times."""
    cache, live = SlotCache(model.config), [0, 1]
    found: list[list[torch.Tensor]] = [[] for _ in tokens]

    def enter(rows: list[int]) -> None:
        read, prompts = SlotCache(model.config, len(rows)), tokens[rows, :_NUM_TOKENS].clone()
        lengths = torch.tensor([_NUM_TOKENS - _PADDING[row] for row in rows])
        for prompt, length in zip(prompts, lengths.tolist(), strict=True):
            prompt[: _NUM_TOKENS - length] = 0
        for row, logits in zip(rows, next_logits(model, read, prompts, lengths), strict=True):
            found[row].append(logits)
        cache.add(read, range(len(rows)))

    enter(live)
    for step in range(_NUM_NEW_TOKENS):
        if step == _ENTERS:
            enter([2])
            live.append(2)
        if step == _LEAVES:
            live = [live[place] for place in cache.keep([1, 2])]
        places = [_NUM_TOKENS + len(found[row]) - 1 for row in live]
        lengths = torch.tensor([place + 1 - _PADDING[row] for place, row in zip(places, live, strict=True)])
        cache.narrow(int(lengths.max()) - 1)
        for row, logits in zip(live, next_logits(model, cache, tokens[live, places][:, None], lengths), strict=True):
            found[row].append(logits)
    return found
