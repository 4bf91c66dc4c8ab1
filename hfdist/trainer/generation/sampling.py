"""Samples completions that do not depend on the layout: weights, prompt and seed decide a row's tokens.

The Gumbel-max trick: the highest of log-probabilities with independent Gumbel noise is a sample of the distribution. A
row's noise follows from its seed and the number of the token alone, so it is the same in any batch, on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import continue_rows
from hfdist.trainer.generation.gumbel import gumbel_noise, split_seeds
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.score import BUDGETS, LIKELIEST, ROWS, Choice, Score

_KEYS = "keys"
"""Name among the extras of the keys of the rows' noise."""
_BEFORE = "before"
"""Name among the extras of the number of tokens before, of rows that go on; int64 of shape [rows, 1]."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from, as transformers' `generate` defines it."""

    temperature: float = 1.0
    """What logits are divided by; > 0."""
    top_k: int | None = None
    """Number of the likeliest tokens that one is drawn from, >= 1; None: all tokens."""
    top_p: float = 1.0
    """A token is drawn from the fewest likeliest ones whose probabilities sum to this; > 0, and 1: all tokens."""

    @classmethod
    def of(cls, task: TaskConfig) -> Sampling:
        """Make that of a task."""
        return cls(temperature=task.temperature, top_k=task.top_k, top_p=task.top_p)

    def warpers(self) -> LogitsProcessorList:
        """Give what changes logits, in the order of transformers' `generate`."""
        warpers = LogitsProcessorList()
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Drawn(NamedTuple):
    """What was drawn after a row."""

    tokens: list[int]
    """The one that ended it included."""
    log_probabilities: list[float] | None
    """Log-probability of each token when it was drawn; None: the sampler does not record them."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws what follows rows of tokens from one model."""

    limits: GenerationLimits
    """Where a continuation ends."""
    sampling: Sampling
    """The distribution."""
    topology: Topology
    """The place of this rank."""
    uses_cache: bool
    """See `continue_rows`."""
    records: bool = False
    """Whether log-probabilities are given, too; in a process without others."""

    def draw(
        self,
        rows: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        forward: Forward,
        *,
        rows_at_once: int,
        before: Sequence[int] | None = None,
        budgets: Sequence[int] | None = None,
        images: RowImages | None = None,
    ) -> list[Drawn]:
        """Draw a continuation of each row of this data rank. All ranks call it.

        Within `Engine.gathered`, sharded weights are gathered once, and data ranks do not wait for each other.

        Args:
            rows: the same on all ranks of a model replica, and equally many on all data ranks. The beginning of one
                that is too long for the model is left out.
            seeds: one for each row, of which 64 bits count; None: the likeliest tokens are taken.
            forward: runs forwards in the layout.
            rows_at_once: the most rows of a data rank in a forward.
            before: see `make_choice`.
            budgets: the most new tokens of each row; None: those of the limits.
            images: those of the rows; None: the run has none.

        Returns:
            The new tokens, on all ranks of the model replica.
        """
        choice = LIKELIEST
        if seeds is not None:
            # A single seed would be broadcast to all rows.
            assert len(seeds) == len(rows), (len(seeds), len(rows))
            choice = make_choice(seeds, self.sampling, before=before)
        if budgets is not None:
            choice = replace(choice, extras={**choice.extras, BUDGETS: torch.tensor(budgets)})
        recorded = TokenLogProbabilities(self.sampling.temperature) if self.records else None
        written = continue_rows(
            rows,
            forward,
            self.limits,
            choice=choice if recorded is None else replace(choice, score=recorded.recording(choice.score)),
            images=images,
            topology=self.topology,
            rows_at_once=rows_at_once,
            uses_cache=self.uses_cache,
        )
        values = [None] * len(written) if recorded is None else recorded.log_probabilities(written)
        return list(map(Drawn, written, values))


def make_choice(seeds: Sequence[int], sampling: Sampling, *, before: Sequence[int] | None = None) -> Choice:
    """Give what draws the tokens of rows with these seeds.

    `before`: number of tokens after which each row goes on, so that its noise does, too; None: all rows begin.
    """
    extras = {_KEYS: split_seeds(seeds)}
    if before is not None:
        extras[_BEFORE] = torch.tensor(before, dtype=torch.int64)[:, None]
    return Choice(partial(perturb, warpers=sampling.warpers()), extras)


def perturb(
    logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor, *, warpers: LogitsProcessorList
) -> torch.Tensor:
    """Add each row's noise to its warped logits, which are log-probabilities but for a constant; float32."""
    num_before = num_before + extras[_BEFORE] if _BEFORE in extras else num_before
    # None of these warpers reads what has been written.
    unread: Any = None
    return gumbel_noise(extras[_KEYS], num_before, logits.shape[-1]).add_(warpers(unread, logits))


class TokenLogProbabilities:
    """The log-probability of each token that is drawn, by the softmax of all logits at a temperature.

    It is of one call of `continue_rows`. The loss computes it in the same way: `top_k` and `top_p` change which tokens
    can be drawn, and not this number.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows and the log-probabilities of a token of each, in the order in which they are drawn; shapes [rows]."""

    def recording(self, score: Score) -> Score:
        """Give a score that records the log-probabilities of what it draws."""

        def record(logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor) -> torch.Tensor:
            # Before: warpers may write into the logits.
            log_probabilities = (logits / self._temperature).log_softmax(-1)
            scores = score(logits, extras, num_before)
            drawn = log_probabilities.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
            self._drawn.append((extras[ROWS], drawn))
            return scores

        return record

    def log_probabilities(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Give the log-probability of each token of each row."""
        found: list[list[float]] = [[] for _ in completions]
        for rows, drawn in self._drawn:
            for row, value in zip(rows.tolist(), drawn.tolist(), strict=True):
                found[row].append(value)
        return [values[: len(tokens)] for values, tokens in zip(found, completions, strict=True)]
