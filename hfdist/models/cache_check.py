"""Checks that a model gives the same logits with a slot cache as without a cache, by trying a small one of its class.

A mistake for one family of models would give samples of another distribution, without an error.

    new tokens    0 . . 3 . . 6 . . 9
    row 0         a a a a a a               leaves the cache after 6
    row 1         b b b b b b b b b
    row 2               c c c c c c         enters it after 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hfdist.errors import first_line
from hfdist.models.document_attention import dense_name
from hfdist.models.image_text import make_small
from hfdist.models.new_tokens import PromptRows
from hfdist.models.probing import small_model
from hfdist.models.slot_cache import SlotCache, next_logits

BOUND = 1e-5
"""The largest difference of logits that is allowed, relative to the largest logit: rounding differs."""

NUM_NEW_TOKENS = 9
"""Number of tokens of each row after its prompt: windows of small models end among them.

There are not more, since small models of Phi-3 rotate otherwise from 17 tokens on, with a cache only the new keys.
"""
_LENGTHS = 7, 4, 2
"""Tokens of the prompts of the three rows of text."""
_ENTERS = 3
"""Number of new tokens after which the last row enters."""
_LEAVES = 6
"""Number of new tokens after which the first row leaves."""


class CacheTrial(NamedTuple):
    """Three rows with which a cache is tried."""

    rows: Sequence[Mapping[str, torch.Tensor]]
    """The inputs of a forward without a cache, for each row; token ids have the shape [1, tokens]."""
    prompts: PromptRows
    """The prompts of the rows: all of their tokens but the last `NUM_NEW_TOKENS`."""


def find_cache_problem(
    model: PreTrainedModel,
    act: Callable[[PreTrainedModel], Any] = lambda small: small,
    make_trial: Callable[[], CacheTrial] | None = None,
) -> str | None:
    """Say why models of this class cannot use a cache whose rows come and go; None: they can.

    The trial takes a second or less, and needs no other rank.

    Args:
        model: the run's model, of which the class and the config are read.
        act: takes the small model, and gives an object that acts as it, such as one split over a pipeline.
        make_trial: makes rows with images; None: the rows are text.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            small = _make_small(model, knows_images=make_trial is not None)
            difference = _compare(small, act(small), _text_trial(small) if make_trial is None else make_trial())
    except Exception as error:  # whatever a model raises that cannot be made small, or split, or has no such cache
        return f"a small model of it cannot be tried: {first_line(error)}"
    # The comparison stands this way around, since a difference of NaN is no agreement.
    return None if difference <= BOUND else f"logits differ by {difference:.0e}"


def _make_small(model: PreTrainedModel, *, knows_images: bool) -> PreTrainedModel:
    small = make_small(model.config) if knows_images else small_model(model)
    if knows_images:
        # All ranks try the same; `small_model` seeds by itself.
        torch.default_generator.manual_seed(0)
    if dense_name(model.config._attn_implementation) == "sdpa":
        small.set_attn_implementation("sdpa")
    for parameter in small.parameters():
        # With larger weights a mistake changes the logits by more than rounding does.
        parameter.add_(0.1 * torch.randn(parameter.shape))
    return small


def _text_trial(small: PreTrainedModel) -> CacheTrial:
    """Make three rows of text, of different lengths."""
    vocab_size = small.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (len(_LENGTHS), max(_LENGTHS) + NUM_NEW_TOKENS))
    rows = [own[None, max(_LENGTHS) - length :] for own, length in zip(tokens, _LENGTHS, strict=True)]
    prompts = [row[0, :-NUM_NEW_TOKENS].tolist() for row in rows]
    return CacheTrial([{"input_ids": row} for row in rows], PromptRows(prompts))


def _compare(small: PreTrainedModel, cached: Any, trial: CacheTrial) -> float:
    """Give the largest difference of the logits of `cached`, which acts as the small model, relative to the largest."""
    found = _write(cached, trial)
    differences, largest = [], []
    for row, inputs in enumerate(trial.rows):
        without_cache: Any = small(**inputs)
        wanted = without_cache.logits[0, -NUM_NEW_TOKENS - 1 :][: len(found[row])]
        differences.append(float((torch.stack(found[row]) - wanted).abs().max()))
        largest.append(float(wanted.abs().max()))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max()) / max(largest)


def _write(model: Any, trial: CacheTrial) -> list[list[torch.Tensor]]:
    """Give the logits of each new token of each row; rows begin, enter and leave at different times."""
    cache, live, prompts = SlotCache(model.config), [0, 1], trial.prompts
    found: list[list[torch.Tensor]] = [[] for _ in trial.rows]

    def enter(rows: list[int]) -> None:
        read = SlotCache(model.config, len(rows))
        for row, logits in zip(rows, next_logits(model, read, prompts.read(rows)), strict=True):
            found[row].append(logits)
        cache.add(read, range(len(rows)))

    enter(live)
    for step in range(NUM_NEW_TOKENS):
        if step == _ENTERS:
            enter([2])
            live.append(2)
        if step == _LEAVES:
            live = [live[place] for place in cache.keep([1, 2])]
        lengths = [len(prompts.ids[row]) + len(found[row]) for row in live]
        tokens = [int(trial.rows[row]["input_ids"][0, n - 1]) for row, n in zip(live, lengths, strict=True)]
        cache.narrow(max(lengths) - 1)
        for row, logits in zip(live, next_logits(model, cache, prompts.step(live, tokens, lengths)), strict=True):
            found[row].append(logits)
    return found
