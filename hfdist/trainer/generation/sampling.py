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
"""Name of the extra tensor with the keys of each row's noise."""
_BEFORE = "before"
"""Name of the extra tensor with the number of tokens that each row that goes on has already; int64 [rows, 1]."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from, as transformers' `generate` defines it."""

    temperature: float = 1.0
    """Number that logits are divided by; > 0."""
    top_k: int | None = None
    """Number of the likeliest tokens that one is drawn from, >= 1; None: all tokens."""
    top_p: float = 1.0
    """A token is drawn from the fewest likeliest ones whose probabilities sum to this; > 0, and 1: all tokens."""

    @classmethod
    def of(cls, task: TaskConfig) -> Sampling:
        """Make the distribution that a task's config asks for."""
        return cls(temperature=task.temperature, top_k=task.top_k, top_p=task.top_p)

    def warpers(self) -> LogitsProcessorList:
        """Give the functions that change logits for this distribution, in the order of transformers' `generate`."""
        warpers = LogitsProcessorList()
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Drawn(NamedTuple):
    """The continuation that was drawn for a row."""

    tokens: list[int]
    """New tokens, the one that ended the row included."""
    log_probabilities: list[float] | None
    """Log-probability of each token when it was drawn; None: the sampler does not record them."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws what follows rows of tokens from one model."""

    limits: GenerationLimits
    """The tokens and the length that end a continuation."""
    sampling: Sampling
    """The distribution that tokens are drawn from."""
    topology: Topology
    """The place of this rank in the layout."""
    uses_cache: bool
    """Whether rows are continued with a cache of keys and values, where the layout lets it."""
    records: bool = False
    """Whether log-probabilities are given, too; only in a process that generates alone."""

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
            rows: tokens of each row, the same on all ranks of a model replica, and equally many rows on all data ranks.
                The beginning of a row that is too long for the model is left out.
            seeds: one for each row, of which 64 bits count; None: the likeliest tokens are taken.
            forward: runs forwards in the layout.
            rows_at_once: the most rows of a data rank in a forward.
            before: number of tokens that were drawn for each row earlier; None: all rows begin.
            budgets: the most new tokens of each row; None: `limits.max_new_tokens` for each.
            images: the images of the rows; None: the run has none.

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
        if recorded is not None:
            choice = replace(choice, score=recorded.recording(choice.score))
        written = continue_rows(
            rows,
            forward,
            self.limits,
            choice=choice,
            images=images,
            topology=self.topology,
            rows_at_once=rows_at_once,
            uses_cache=self.uses_cache,
        )
        if recorded is None:
            return [Drawn(tokens, None) for tokens in written]
        return list(map(Drawn, written, recorded.log_probabilities(written)))


def make_choice(seeds: Sequence[int], sampling: Sampling, *, before: Sequence[int] | None = None) -> Choice:
    """Make the choice that draws the tokens of rows with these seeds.

    `before` has the number of tokens that were drawn for each row earlier: its noise goes on there; None: rows begin.
    """
    extras = {_KEYS: split_seeds(seeds)}
    if before is not None:
        extras[_BEFORE] = torch.tensor(before, dtype=torch.int64)[:, None]
    return Choice(partial(perturb, warpers=sampling.warpers()), extras)


def perturb(
    logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor, *, warpers: LogitsProcessorList
) -> torch.Tensor:
    """Give each row's warped logits with its noise, [rows, vocabulary], float32: the highest is the token drawn.

    Logits are log-probabilities up to a constant, which changes no maximum.
    """
    if _BEFORE in extras:
        num_before = num_before + extras[_BEFORE]
    # The warpers of temperature, top-k and top-p read no earlier tokens.
    unread: Any = None
    return gumbel_noise(extras[_KEYS], num_before, logits.shape[-1]).add_(warpers(unread, logits))


class TokenLogProbabilities:
    """The log-probability of each token that is drawn, by the softmax of all logits at a temperature.

    An object serves one call of `continue_rows`. The loss computes log-probabilities in the same way: `top_k` and
    `top_p` change which tokens can be drawn, and not their log-probabilities.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        """For each token place: numbers of rows, and the log-probability of the token of each; both of shape [rows]."""

    def recording(self, score: Score) -> Score:
        """Give a score that records the log-probabilities of what it draws."""

        def record(logits: torch.Tensor, extras: Batch, num_before: int | torch.Tensor) -> torch.Tensor:
            # Before the score is computed: warpers may write into the logits.
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
