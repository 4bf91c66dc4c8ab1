"""Continues rows of tokens in any layout; a function of the logits chooses each token.

Rows have slots in a cache (`slots.py`); in a pipeline each stage has a cache of its own blocks. Context ranks, and
models without such a cache, compute all tokens again for each new one.
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
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.collectives import device_of, first_problem, world_size
from hfdist.models.cache_check import find_cache_problem
from hfdist.strategies.engine import Batch, Forward
from hfdist.strategies.held import is_partitioned
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.score import BUDGETS, ROWS, Score, likeliest, logits_of, never
from hfdist.trainer.generation.slots import Slots

logger = logging.getLogger(__name__)

_LENGTH_STEP_TOKENS = 64
"""Sequences are padded to a multiple of it, so that few shapes occur."""
_TRIED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""What `can_generate` has found: rollouts and samples of one run ask for the same model."""


def continue_rows(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: GenerationLimits,
    *,
    score: Score = likeliest,
    extras: Batch | None = None,
    images: RowImages | None = None,
    topology: Topology,
    rows_at_once: int,
    uses_cache: bool,
) -> list[list[int]]:
    """Continue the rows of this data rank. All ranks call it, with equally many rows.

    Args:
        prompts: the same on all ranks of a model replica; the beginning of one that is too long is left out.
        forward: runs forwards in the layout.
        limits: where a continuation ends.
        score: chooses the next token.
        extras: what `score` needs of each row, tensors of shape [rows, ...]; and `BUDGETS`, if rows have their own.
        images: those of the rows, whose prompts are not too long; None: the run has none.
        topology: the place of this rank.
        rows_at_once: the most rows of this data rank in a forward.
        uses_cache: whether they are continued with a cache where the layout lets it; see `can_generate`.

    Returns:
        The new tokens of each row, the one that ended it included, on all ranks of the model replica.
    """
    limits.room()
    most = torch.full((len(prompts),), limits.max_new_tokens)
    needed = {ROWS: torch.arange(len(prompts)), BUDGETS: most, **(extras or {})}
    rows = [limits.cut(prompt, own) for prompt, own in zip(prompts, needed[BUDGETS].tolist(), strict=True)]
    score = score if images is None else never(score, images.tokens.ids.tolist())
    arguments = (forward, limits, score, topology)
    # TODO
    uses_cache = uses_cache and images is None
    written = _continue_in_slots(rows, needed, *arguments, rows_at_once) if uses_cache else []
    # Also in a pipeline whose stages cannot have a cache each, which shows in the first call.
    for start in range(0 if not written else len(rows), len(rows), rows_at_once):
        some = slice(start, start + rows_at_once)
        own = {name: values[some] for name, values in needed.items()}
        seen = None if images is None else images.part(some)
        written += [_up_to_end(tokens, limits) for tokens in _recompute_rows(rows[some], own, seen, *arguments)]
    return written


def _up_to_end(tokens: list[int], limits: GenerationLimits) -> list[int]:
    before = list(takewhile(lambda token: token not in limits.end_ids, tokens))
    return tokens[: len(before) + 1]


def exchange(values: list[torch.Tensor], num_rows: int, num_tokens: int, topology: Topology) -> torch.Tensor:
    """Give all ranks the tokens of all data ranks. A collective.

    Args:
        values: of this data rank's rows, [rows, tokens], in one part or more; empty if another rank has them.
        num_rows: of each data rank; rows of `values` beyond it are left out.
        num_tokens: of each row.
        topology: the place of this rank.

    Returns:
        Tokens of shape [data ranks, rows, tokens], on the CPU.
    """
    # Token ids are not negative, and all ranks that know a row's tokens know the same.
    device = device_of(None) if dist.is_initialized() else torch.device("cpu")
    tokens = torch.full((topology.data, num_rows, num_tokens), -1, device=device)
    if values:
        tokens[topology.data_rank] = torch.cat(values)[:num_rows].to(device)
    if dist.is_initialized():
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
    return tokens.cpu()


def can_generate(model: PreTrainedModel, topology: Topology) -> bool:
    """Whether rows are continued with a cache. A collective, if there is a process group; a model is tried once.

    Context ranks read parts of sequences. Stages of a pipeline are tried at the first generation.
    """
    if topology.context > 1 or topology.pipeline > 1:
        return topology.context == 1
    if model not in _TRIED:
        # Ranks of different machines must not disagree.
        problem = first_problem(find_cache_problem(model))
        if problem is not None and topology.is_main:
            logger.warning("each new token is computed from all tokens before it, without a cache: %s", problem)
        _TRIED[model] = problem is None
    return _TRIED[model]


def _continue_in_slots(
    rows: list[list[int]],
    extras: Batch,
    forward: Forward,
    limits: GenerationLimits,
    score: Score,
    topology: Topology,
    rows_at_once: int,
) -> list[list[int]]:
    """Continue them with a cache; nothing comes of it in a pipeline that cannot."""
    written: list[list[int]] = []

    def write(model: nn.Module, part: Batch) -> None:
        inner: Any = getattr(model, "module", model)
        # ZeRO-3's forward compares its order of modules between ranks until it knows it, also where all weights are
        # whole. Ranks that share experts send each other tokens.
        is_collective = topology.expert > 1 or any(
            is_partitioned(p) or hasattr(p, "ds_status") for p in inner.parameters()
        )
        slots = Slots(
            inner,
            rows,
            part,
            limits=limits,
            score=score,
            num_slots=rows_at_once,
            waits=is_collective and world_size() > 1,
        )
        # Each length would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            # Tensor ranks have the same logits, so each knows the tokens without being told.
            written.extend(slots.run())

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
    """Continue token by token, until the rows of all data ranks have ended."""
    whole = [list(ids) for ids in rows]
    budgets = exchange([extras[BUDGETS][:, None]], len(rows), 1, topology).squeeze(-1)
    ends = torch.tensor(sorted(limits.end_ids), dtype=torch.long)
    is_done = torch.zeros(topology.data, len(rows), dtype=torch.bool)
    for num_before in range(limits.max_new_tokens):
        longest = max(map(len, whole))
        length = -(-longest // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS
        if limits.most_tokens is not None:
            length = max(longest, min(length, limits.most_tokens))
        fill = [0 if images is None else images.fill_id] * length
        input_ids = torch.tensor([ids + fill[len(ids) :] for ids in whole])
        seen = {} if images is None else images.batch(input_ids, [len(prompt) for prompt in rows])
        batch = {"input_ids": input_ids, "last": torch.tensor([len(ids) - 1 for ids in whole]), **extras, **seen}
        choose = partial(next_tokens, score=score, num_before=num_before, of_images=tuple(seen))
        values = forward(batch, choose)
        new = exchange(values, len(rows), 1, topology).squeeze(-1)
        for ids, most, token in zip(whole, extras[BUDGETS].tolist(), new[topology.data_rank].tolist(), strict=True):
            # Later tokens of a row that has ended are dropped; beyond its budget the model may have no places for them.
            if num_before < most:
                ids.append(token)
        is_done |= torch.isin(new, ends) | (budgets <= num_before + 1)
        if is_done.all():
            break
    return [ids[len(prompt) :] for ids, prompt in zip(whole, rows, strict=True)]


def next_tokens(
    model: nn.Module, batch: Batch, *, score: Score = likeliest, num_before: int = 0, of_images: Collection[str] = ()
) -> torch.Tensor:
    """Give the token after place `last` of each sequence; shape [sequences, 1].

    What comes after that place does not matter: the model is causal. `of_images`: names of what it takes of images.
    """
    return score(_next_logits(model, batch, of_images).float(), batch, num_before).argmax(-1, keepdim=True)


def _next_logits(model: nn.Module, batch: Batch, of_images: Collection[str]) -> torch.Tensor:
    last = batch["last"]
    inputs = {name: batch[name] for name in ("input_ids", *of_images)}
    rows = torch.arange(len(last), device=last.device)
    if "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters:
        # Logits of all places may be more than all else that the model keeps.
        places, column = torch.unique(last, return_inverse=True)
        logits = logits_of(model(**inputs, logits_to_keep=places))
        if logits.shape[1] == len(places):
            return logits[rows, column]
    return logits_of(model(**inputs))[rows, last]
