"""Continues rows of tokens in any layout; a function of the logits chooses each token.

transformers' own `generate` continues rows, with a cache of keys and values; in a pipeline each stage has one, of its
own blocks. Context ranks, and models without such a cache, compute all tokens again for each new one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hfdist.collectives import device_of, world_size
from hfdist.strategies.engine import Batch, Forward
from hfdist.strategies.held import is_partitioned
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits

_LENGTH_STEP_TOKENS = 64
"""Sequences are padded to a multiple of it, so that few shapes occur."""

Score = Callable[[torch.Tensor, Batch, int], torch.Tensor]
"""(logits, batch, number of new tokens before) -> scores, of which the highest is the next token's.

Logits and scores are of shape [rows, vocabulary], logits in float32. The batch has `input_ids`, and `extras`.
"""


def likeliest(logits: torch.Tensor, batch: Batch, num_before: int) -> torch.Tensor:
    """Score tokens for greedy decoding."""
    return logits


def continue_rows(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: GenerationLimits,
    *,
    score: Score = likeliest,
    extras: Batch | None = None,
    topology: Topology,
    uses_cache: bool,
) -> list[list[int]]:
    """Continue the rows of this data rank at once. All ranks call it, with equally many rows.

    Args:
        prompts: the same on all ranks of a model replica; the beginning of one that is too long is left out.
        forward: runs forwards in the layout.
        limits: where a continuation ends.
        score: chooses the next token.
        extras: what `score` needs of each row, tensors of shape [rows, ...].
        topology: the place of this rank.
        uses_cache: whether `generate` continues them where the layout lets it; see `can_generate`.

    Returns:
        The new tokens of each row, the one that ended it included, on all ranks of the model replica.
    """
    room = limits.room()
    rows = [list(prompt if room is None else prompt[-room:]) for prompt in prompts]
    arguments = (rows, extras or {}, forward, limits, score, topology)
    written = _generate_rows(*arguments) if uses_cache else []
    if not written:
        # Also in a pipeline whose stages cannot have a cache each, which shows in the first call.
        written = _recompute_rows(*arguments)
    return [_up_to_end(tokens, limits) for tokens in written]


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
    """Whether `generate` continues rows of different lengths: ranks read whole sequences.

    Recurrent models may read what pads rows. Whether the stages of a pipeline can, it tries at the first generation.
    """
    return bool(topology.context == 1 and model.can_generate() and model._supports_sdpa and not model._is_stateful)


def _generate_rows(
    rows: list[list[int]], extras: Batch, forward: Forward, limits: GenerationLimits, score: Score, topology: Topology
) -> list[list[int]]:
    """Let `generate` continue them; nothing comes of it in a pipeline that cannot."""
    longest = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows]),
        **extras,
    }
    written: list[torch.Tensor] = []

    def write(model: nn.Module, part: Batch) -> None:
        # Tensor ranks have the same logits, so each knows the tokens without being told.
        written.append(generate(model, part, limits=limits, score=score, exchanges_tokens=topology.expert > 1))

    forward(batch, write, as_whole=True)
    return [tokens for part in written for tokens in part.tolist()]


class _Scores(LogitsProcessor):
    """A `Score` as `generate` calls it."""

    def __init__(self, score: Score, batch: Batch) -> None:
        self._score, self._batch = score, batch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._score(scores, self._batch, input_ids.shape[1] - self._batch["input_ids"].shape[1])


def generate(
    model: nn.Module, batch: Batch, *, limits: GenerationLimits, score: Score, exchanges_tokens: bool = False
) -> torch.Tensor:
    """Give the tokens that continue each sequence; what comes after a token of `end_ids` does not matter.

    Ranks wait for each other at each token only where a forward is a collective over data ranks.

    Args:
        model: with all blocks.
        batch: `input_ids` and `attention_mask`, padded on the left, and what `score` needs.
        limits: where continuations end.
        score: chooses the next token.
        exchanges_tokens: whether data ranks send each other tokens in a forward, as experts that are spread over them.

    Returns:
        Tokens of shape [sequences, at most max_new_tokens].
    """
    inner: Any = getattr(model, "module", model)
    ends = sorted(limits.end_ids)
    # The model's own may sample, or punish what comes again.
    own, inner.generation_config = inner.generation_config, GenerationConfig()
    plain = GenerationConfig(
        do_sample=False,
        max_new_tokens=limits.max_new_tokens,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    # ZeRO-3's forward compares its order of modules between ranks until it knows it, also where all weights are whole.
    is_collective = exchanges_tokens or any(is_partitioned(p) or hasattr(p, "ds_status") for p in inner.parameters())
    try:
        # Each length would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            whole: torch.Tensor = inner.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=plain,
                logits_processor=LogitsProcessorList([_Scores(score, batch)]),
                synced_gpus=is_collective and world_size() > 1,
            )
    finally:
        inner.generation_config = own
    return whole[:, batch["input_ids"].shape[1] :]


def _recompute_rows(
    rows: list[list[int]], extras: Batch, forward: Forward, limits: GenerationLimits, score: Score, topology: Topology
) -> list[list[int]]:
    """Continue token by token, until the rows of all data ranks have ended."""
    whole = [list(ids) for ids in rows]
    ends = torch.tensor(sorted(limits.end_ids), dtype=torch.long)
    is_done = torch.zeros(topology.data, len(rows), dtype=torch.bool)
    for num_before in range(limits.max_new_tokens):
        longest = max(map(len, whole))
        length = -(-longest // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS
        if limits.most_tokens is not None:
            length = max(longest, min(length, limits.most_tokens))
        batch = {
            "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in whole]),
            "last": torch.tensor([len(ids) - 1 for ids in whole]),
            **extras,
        }
        values = forward(batch, partial(next_tokens, score=score, num_before=num_before))
        new = exchange(values, len(rows), 1, topology).squeeze(-1)
        for ids, token in zip(whole, new[topology.data_rank].tolist(), strict=True):
            ids.append(token)
        is_done |= torch.isin(new, ends)
        if is_done.all():
            break
    return [ids[len(prompt) :] for ids, prompt in zip(whole, rows, strict=True)]


def next_tokens(model: nn.Module, batch: Batch, *, score: Score = likeliest, num_before: int = 0) -> torch.Tensor:
    """Give the token after place `last` of each sequence; shape [sequences, 1].

    What comes after that place does not matter: the model is causal.
    """
    return score(_next_logits(model, batch).float(), batch, num_before).argmax(-1, keepdim=True)


def _next_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    input_ids, last = batch["input_ids"], batch["last"]
    rows = torch.arange(len(last), device=last.device)
    if "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters:
        # Logits of all places may be more than all else that the model keeps.
        places, column = torch.unique(last, return_inverse=True)
        logits = _logits(model(input_ids=input_ids, logits_to_keep=places))
        if logits.shape[1] == len(places):
            return logits[rows, column]
    return _logits(model(input_ids=input_ids))[rows, last]


def _logits(outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits
