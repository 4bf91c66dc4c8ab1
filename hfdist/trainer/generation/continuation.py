"""Continues rows of tokens in any layout; a function of the logits chooses each token.

A row has a slot in a cache of keys and values; in a pipeline each stage has a cache of its own blocks. Context ranks,
and models without such a cache, compute all tokens again for each new one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hfdist.collectives import first_problem, world_size
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.models.cache_check import find_cache_problem
from hfdist.models.new_tokens import PromptRows
from hfdist.strategies.engine import Batch, Forward
from hfdist.strategies.held import is_partitioned
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages, make_cache_trial
from hfdist.trainer.generation.score import BUDGETS, LIKELIEST, ROWS, Choice, Score, leaving_out, likeliest, logits_of
from hfdist.trainer.generation.shares import exchange
from hfdist.trainer.generation.slots import Slots

logger = logging.getLogger(__name__)

_LENGTH_STEP_TOKENS = 64
"""Sequences are padded to a multiple of it, so that few shapes occur."""
_TRIED: WeakKeyDictionary[PreTrainedModel, dict[bool, bool]] = WeakKeyDictionary()
"""What `can_use_cache` has found, by whether rows have images: rollouts and samples of one run ask for the same."""


def continue_rows(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: GenerationLimits,
    *,
    choice: Choice = LIKELIEST,
    images: RowImages | None = None,
    topology: Topology,
    rows_at_once: int,
    uses_cache: bool,
) -> list[list[int]]:
    """Continue the rows of this data rank. All ranks call it, with equally many rows.

    Args:
        prompts: tokens of each row, the same on all ranks of a model replica; the beginning of a prompt that is too
            long is left out.
        forward: runs forwards in the layout.
        limits: says at which token or length a continuation ends.
        choice: what chooses the next token of each row; it may say `BUDGETS`, if rows have their own.
        images: the images of the rows, whose prompts are not too long; None: the run has none.
        topology: the place of this rank.
        rows_at_once: the most rows of this data rank in a forward.
        uses_cache: whether rows are continued with a cache where the layout lets it; see `can_use_cache`.

    Returns:
        The new tokens of each row, the one that ended it included, on all ranks of the model replica.
    """
    # Called for its error alone: a model may have no room for the new tokens.
    limits.room()
    score = choice.score if images is None else leaving_out(choice.score, images.tokens.ids.tolist())
    budgets = torch.full((len(prompts),), limits.max_new_tokens)
    needed = {ROWS: torch.arange(len(prompts)), BUDGETS: budgets, **choice.extras}
    rows = [limits.cut(prompt, budget) for prompt, budget in zip(prompts, needed[BUDGETS].tolist(), strict=True)]
    if uses_cache:
        prompt_rows = PromptRows(rows) if images is None else images.prompt_rows(rows)
        written = _continue_in_slots(prompt_rows, needed, forward, limits, score, topology, rows_at_once)
        if written is not None:
            return written
    recomputed: list[list[int]] = []
    for start in range(0, len(rows), rows_at_once):
        part = slice(start, start + rows_at_once)
        needed_of_part = {name: values[part] for name, values in needed.items()}
        images_of_part = None if images is None else images.part(part)
        new_tokens = _recompute_rows(rows[part], needed_of_part, images_of_part, forward, limits, score, topology)
        recomputed += [_up_to_end(tokens, limits) for tokens in new_tokens]
    return recomputed


def _up_to_end(tokens: list[int], limits: GenerationLimits) -> list[int]:
    """Give the tokens up to the first end token, that one included."""
    before = list(takewhile(lambda token: token not in limits.end_ids, tokens))
    return tokens[: len(before) + 1]


def can_use_cache(model: PreTrainedModel, topology: Topology, images: ImageTokens | None = None) -> bool:
    """Whether rows are continued with a cache. A collective, if there is a process group; a model is tried once.

    `images`: what images of rows become; None: rows are text.
    """
    if topology.context > 1:
        # Each rank reads a part of a sequence.
        return False
    if topology.pipeline > 1:
        # Stages are tried at the first generation.
        return True
    has_images = images is not None
    tried = _TRIED.setdefault(model, {})
    if has_images not in tried:
        make_trial = None if images is None else partial(make_cache_trial, images)
        # Ranks of different machines must not disagree.
        problem = first_problem(find_cache_problem(model, make_trial=make_trial))
        if problem is not None and topology.is_main:
            of_images = " and images" if has_images else ""
            what = "each new token is computed from all tokens%s before it, without a cache: %s"
            logger.warning(what, of_images, problem)
        tried[has_images] = problem is None
    return tried[has_images]


def _continue_in_slots(
    rows: PromptRows,
    extras: Batch,
    forward: Forward,
    limits: GenerationLimits,
    score: Score,
    topology: Topology,
    rows_at_once: int,
) -> list[list[int]] | None:
    """Continue the rows with a cache; None: a pipeline whose stages cannot have one each, which shows here."""
    written: list[list[int]] | None = None

    def write(model: nn.Module, part: Batch) -> None:
        nonlocal written
        inner: Any = getattr(model, "module", model)
        # ZeRO-3's forward compares its order of modules between ranks until it knows it, also where all weights are
        # whole: they have a `ds_status`. Ranks that share experts send each other tokens.
        is_of_zero3 = any(is_partitioned(p) or hasattr(p, "ds_status") for p in inner.parameters())
        is_collective = topology.expert > 1 or is_of_zero3
        slots = Slots(
            inner,
            rows,
            part,
            limits=limits,
            score=score,
            num_slots=rows_at_once,
            waits=is_collective and world_size() > 1,
        )
        # torch would compile a compiled model anew for each length.
        with torch.compiler.set_stance("force_eager"):
            # Tensor ranks have the same logits, so each knows the tokens without being told.
            written = slots.run()

    forward(extras, write, as_whole=True)
    return written


def _recompute_rows(
    rows: list[list[int]],
    extras: Batch,
    images: RowImages | None,
    forward: Forward,
    limits: GenerationLimits,
    score: Score,
    topology: Topology,
) -> list[list[int]]:
    """Give the new tokens of each row, all computed anew for each; until the rows of all data ranks have ended."""
    whole = [list(ids) for ids in rows]
    budgets = exchange([extras[BUDGETS][:, None]], len(rows), 1, topology).squeeze(-1)
    ends = torch.tensor(sorted(limits.end_ids), dtype=torch.long)
    is_done = torch.zeros(topology.data, len(rows), dtype=torch.bool)
    pixels = {} if images is None else images.stack()
    kinds = {} if images is None else images.kinds(rows)
    for num_before in range(limits.max_new_tokens):
        longest = max(map(len, whole))
        length = -(-longest // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS
        if limits.most_tokens is not None:
            length = max(longest, min(length, limits.most_tokens))
        fill = [0 if images is None else images.fill_id] * length
        input_ids = torch.tensor([ids + fill[len(ids) :] for ids in whole])
        # Nothing that the model writes stands for an image.
        padded_kinds = {
            name: torch.stack([pad(row, (0, length - len(row))) for row in rows_kinds])
            for name, rows_kinds in kinds.items()
        }
        image_inputs = pixels | padded_kinds
        last = torch.tensor([len(ids) - 1 for ids in whole])
        batch = {"input_ids": input_ids, "last": last, **extras, **image_inputs}
        choose = partial(next_tokens, score=score, num_before=num_before, image_names=tuple(image_inputs))
        values = forward(batch, choose)
        new = exchange(values, len(rows), 1, topology).squeeze(-1)
        for ids, budget, token in zip(whole, extras[BUDGETS].tolist(), new[topology.data_rank].tolist(), strict=True):
            # Beyond its budget the model may have no positions. What follows an end token is cut off later.
            if num_before < budget:
                ids.append(token)
        is_done |= torch.isin(new, ends) | (budgets <= num_before + 1)
        if is_done.all():
            break
    return [ids[len(prompt) :] for ids, prompt in zip(whole, rows, strict=True)]


def next_tokens(
    model: nn.Module, batch: Batch, *, score: Score = likeliest, num_before: int = 0, image_names: Collection[str] = ()
) -> torch.Tensor:
    """Give the token after place `last` of each sequence; shape [sequences, 1].

    What comes after that place does not matter: the model is causal.

    Args:
        model: a causal language model.
        batch: has `input_ids`, `last`, and what `score` and the model's images need.
        score: gives each token of the vocabulary a number by its logits; the highest is chosen.
        num_before: number of new tokens that stand in the sequences already.
        image_names: keys of `batch` that the model reads images from.
    """
    logits = _next_logits(model, batch, image_names).float()
    return score(logits, batch, num_before).argmax(-1, keepdim=True)


def _next_logits(model: nn.Module, batch: Batch, image_names: Collection[str]) -> torch.Tensor:
    """Give the logits of the token after place `last` of each sequence; shape [sequences, vocabulary]."""
    last = batch["last"]
    inputs = {name: batch[name] for name in ("input_ids", *image_names)}
    rows = torch.arange(len(last), device=last.device)
    if "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters:
        # Logits of all places may be more than all else that the model keeps.
        places, column = torch.unique(last, return_inverse=True)
        logits = logits_of(model(**inputs, logits_to_keep=places))
        # Some models take the argument and give all logits.
        if logits.shape[1] == len(places):
            return logits[rows, column]
    return logits_of(model(**inputs))[rows, last]
