"""Greedy continuations of prompts in the layout that trains: forwards of whole sequences, alike on all ranks.

There is no cache of keys and values: a pipeline's stages and ZeRO-3's parameters are only there for forwards as in
training, and one way for all layouts gives the same tokens in all.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfdist.errors import ConfigError
from hfdist.strategies.base import Batch, Forward
from hfdist.topology import Topology

_LENGTH_STEP_TOKENS = 64
"""Sequences are filled up to a multiple of it, so that few shapes occur."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a continuation ends."""

    max_new_tokens: int
    end_ids: frozenset[int]
    """Tokens that end it, and are no part of it."""
    most_tokens: int | None
    """That the model can read; None: any number."""

    def room(self) -> int | None:
        """Tokens of a prompt, at the most.

        Raises:
            ConfigError: `max_new_tokens` leaves none.
        """
        if self.most_tokens is None:
            return None
        if self.max_new_tokens >= self.most_tokens:
            raise ConfigError(
                "so many new tokens leave the model no room for a prompt",
                where="evaluate.max_new_tokens",
                found=self.max_new_tokens,
                allowed=f"< {self.most_tokens}, the positions of the model",
            )
        return self.most_tokens - self.max_new_tokens


@dataclass
class _Row:
    ids: list[int]
    num_prompt_tokens: int
    is_done: bool = False

    def take(self, token: int, limits: Limits) -> None:
        """Go on with the next token."""
        if token in limits.end_ids:
            self.is_done = True
            return
        self.ids.append(token)
        self.is_done = len(self.ids) - self.num_prompt_tokens >= limits.max_new_tokens


def continue_prompts(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: Limits,
    *,
    topology: Topology,
    rows_at_once: int,
    device: torch.device,
) -> list[list[int]]:
    """Give each prompt's continuation, on all ranks. Call it on all ranks.

    Args:
        prompts: token ids, at least one each; the beginning of one that is too long for the model is left out.
        forward: runs the model.
        limits: where continuations end.
        topology: each data rank continues a share of the prompts.
        rows_at_once: sequences of one forward of a data rank, at the most.
        device: of tensors that travel between ranks.
    """
    room = limits.room()
    continued: list[list[int]] = []
    for start in range(0, len(prompts), rows_at_once * topology.data_size):
        together = prompts[start : start + rows_at_once * topology.data_size]
        cut = [list(prompt if room is None else prompt[-room:]) for prompt in together]
        rows = [_Row(prompt, len(prompt)) for prompt in cut]
        _continue_rows(rows, forward, limits, topology, device)
        continued += [row.ids[row.num_prompt_tokens :] for row in rows]
    return continued


def _continue_rows(
    rows: list[_Row], forward: Forward, limits: Limits, topology: Topology, device: torch.device
) -> None:
    """Continue them together, each data rank its share, which copies of the first row fill up to equal sizes."""
    share = -(-len(rows) // topology.data_size)
    places = range(topology.data_rank * share, (topology.data_rank + 1) * share)
    while not all(row.is_done for row in rows):
        # The same length on all ranks and in all layouts.
        length = _rounded(max(len(row.ids) for row in rows), limits.most_tokens)
        own = [rows[place].ids if place < len(rows) else rows[0].ids for place in places]
        batch = {
            "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in own]),
            "last": torch.tensor([len(ids) - 1 for ids in own]),
        }
        values = forward(batch, next_tokens)
        # Token ids are not negative, and each is known to one rank.
        tokens = torch.full((topology.data_size, share), -1, device=device)
        if values:
            tokens[topology.data_rank] = torch.cat(values)[:share]
        if dist.is_initialized():
            dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
        for row, token in zip(rows, tokens.flatten().tolist(), strict=False):
            if not row.is_done:
                row.take(token, limits)


def _rounded(num_tokens: int, most_tokens: int | None) -> int:
    rounded = -(-num_tokens // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS
    return rounded if most_tokens is None else max(num_tokens, min(rounded, most_tokens))


def next_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Give the likeliest token behind place `last` of each sequence; shape [sequences].

    What stands behind that place does not matter: the model is causal.
    """
    input_ids, last = batch["input_ids"], batch["last"]
    rows = torch.arange(len(last), device=last.device)
    if "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters:
        # Logits of all places may be more than all else that the model keeps.
        places, column = torch.unique(last, return_inverse=True)
        logits = _logits(model(input_ids=input_ids, logits_to_keep=places))
        if logits.shape[1] == len(places):
            return logits[rows, column].argmax(-1)
    return _logits(model(input_ids=input_ids))[rows, last].argmax(-1)


def _logits(outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits
