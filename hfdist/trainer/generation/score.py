"""What chooses the next token of a row: a score of each token, of which the highest wins."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from hfdist.strategies.engine import Batch

ROWS = "rows"
"""Key of the extras with the rows' numbers, int64 of shape [rows]. It is always there."""
BUDGETS = "budgets"
"""Key of the extras with the most new tokens of each row, int64 of shape [rows]. Without it, limits say how many."""
Score = Callable[[torch.Tensor, Batch, "int | torch.Tensor"], torch.Tensor]
"""(logits, extras, number of new tokens before) -> scores, of which the highest is the next token's.

Logits and scores are of shape [rows, vocabulary], logits in float32. The extras are tensors of shape [rows, ...]. The
number is one for all rows, or int64 of shape [rows, 1].
"""


@dataclass(frozen=True)
class Choice:
    """What chooses the next token of each row."""

    score: Score
    extras: Batch = field(default_factory=dict)
    """What the score needs of each row: tensors of shape [rows, ...]."""


def likeliest(logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor) -> torch.Tensor:
    """Score tokens for greedy decoding."""
    return logits


LIKELIEST = Choice(likeliest)
"""Greedy decoding."""


def logits_of(outputs: Any) -> torch.Tensor:
    """Give the logits among a model's outputs, of shape [rows, tokens, vocabulary]."""
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits


def leaving_out(score: Score, tokens: Collection[int]) -> Score:
    """Give a score by which these tokens are not chosen."""

    def without(logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor) -> torch.Tensor:
        left_out = torch.tensor(sorted(tokens), device=logits.device)
        return score(logits.index_fill(-1, left_out, -torch.inf), extras, num_before)

    return without
