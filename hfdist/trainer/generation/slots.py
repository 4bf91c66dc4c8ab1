"""Continues rows in the slots of a cache: a row that has ended leaves at once, and the next prompt takes its slot.

Neighbours with the same prompt read it once, and share copies of its keys and values.

    2 slots, 4 rows     forward    1  2  3  4  5  6
    slot 0                         a  a  .  a  .  c       b ends after its second token, and c takes its slot; a after
    slot 1                         b  b  c  c  d  d       its third: c moves up, and d's prompt is read
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.models.new_tokens import NewTokens, PromptRows
from hfdist.models.slot_cache import SlotCache, next_logits
from hfdist.strategies.engine import Batch
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.score import BUDGETS, ROWS, Score

_REFILLED_SHARE = 1 / 8
"""The share of slots that must be free before prompts are read for them: reading costs a forward."""


class _Prompt(NamedTuple):
    """A prompt that has been read."""

    cache: SlotCache
    """The keys and values of several prompts."""
    row: int
    """The row of `cache` that this prompt has."""
    logits: torch.Tensor
    """Logits of the token that follows; shape [vocabulary]."""


class Slots:
    """The rows of one data rank, and the slots in which they are continued.

    Args:
        model: the model with all its blocks, or in a pipeline what runs all stages.
        prompts: the prompt of each row.
        extras: tensors of shape [rows, ...] on the model's device: those that `score` needs, `ROWS` and `BUDGETS`.
        limits: the tokens that end a row.
        score: gives each token of the vocabulary a number by its logits; the highest is chosen.
        num_slots: the most rows of a forward, >= 1.
        waits: whether each forward is a collective over data ranks, so that all go on until all rows have ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: PromptRows,
        extras: Batch,
        *,
        limits: GenerationLimits,
        score: Score,
        num_slots: int,
        waits: bool,
    ) -> None:
        self._model, self._prompts, self._extras, self._device = model, prompts, extras, extras[ROWS].device
        self._budgets: list[int] = extras[BUDGETS].tolist()
        self._limits, self._score, self._num_slots, self._waits = limits, score, num_slots, waits
        self._numbers = prompts.number()
        """Number of each row's prompt: neighbours with equal prompts have one number."""
        self._waiting = deque(range(len(prompts.ids)))
        """Rows that have no slot yet, in their order."""
        self._read: dict[int, _Prompt] = {}
        """The prompt that the next waiting row needs, if it has been read, by its number; otherwise empty."""
        self._cache = SlotCache(self._model.config)
        self._live: list[int] = []
        """The row in each slot."""
        self._written: list[list[int]] = [[] for _ in prompts.ids]
        self._share = getattr(model, "share_tokens", None)
        """Gives all ranks of a pipeline the tokens that the last stage has chosen."""

    def run(self) -> list[list[int]]:
        """Give the new tokens of each row, the one that ended it included."""
        while self._waiting or self._live:
            num_free = self._num_slots - len(self._live)
            if self._waiting and (not self._live or num_free >= _REFILLED_SHARE * self._num_slots):
                self._fill(num_free)
            else:
                self._step()
        while self._waits and self._does_any_go_on(False):
            # The others cannot run a forward without this rank: it runs one of a single token.
            token = PromptRows([[self._prompts.fill_id]]).read([0])
            next_logits(self._model, SlotCache(self._model.config, 1), token.to(self._device, self._model.dtype))
        return self._written

    def _fill(self, num_free: int) -> None:
        """Give free slots to the next rows: read their prompts, choose their first tokens, copy keys and values."""
        rows = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
        unread = {self._numbers[row]: row for row in rows if self._numbers[row] not in self._read}
        if unread:
            cache = SlotCache(self._model.config, len(unread))
            logits = self._forward(cache, self._prompts.read(list(unread.values())))
            self._read |= {number: _Prompt(cache, row, logits[row]) for row, number in enumerate(unread)}
        read = [self._read[self._numbers[row]] for row in rows]
        goes_on = self._choose(torch.stack([prompt.logits for prompt in read]), rows)
        for cache, prompts in groupby(compress(read, goes_on), key=attrgetter("cache")):
            self._cache.add(cache, [prompt.row for prompt in prompts])
        self._live += compress(rows, goes_on)
        # Only a neighbour may have the same prompt, so the others are forgotten.
        next_number = self._numbers[self._waiting[0]] if self._waiting else None
        self._read = {number: prompt for number, prompt in self._read.items() if number == next_number}

    def _step(self) -> None:
        """Continue each live row by a token."""
        lengths = [len(self._prompts.ids[row]) + len(self._written[row]) for row in self._live]
        self._cache.narrow(max(lengths) - 1)
        newest = [self._written[row][-1] for row in self._live]
        logits = self._forward(self._cache, self._prompts.step(self._live, newest, lengths))
        goes_on = self._choose(logits, self._live)
        if not all(goes_on):
            kept_slots = list(compress(range(len(goes_on)), goes_on))
            order = self._cache.keep(kept_slots)
            self._live = [self._live[slot] for slot in order]

    def _choose(self, logits: torch.Tensor, rows: Sequence[int]) -> list[bool]:
        """Write the next token of each of these rows; give for each whether it goes on."""
        num_before = [len(self._written[row]) for row in rows]
        # One copy to the device for both.
        chosen_rows, before = self._tensor([list(rows), num_before])
        extras = {name: values[chosen_rows] for name, values in self._extras.items()}
        tokens = self._score(logits.float(), extras, before[:, None]).argmax(-1)
        if self._share is not None:
            tokens = self._share(tokens)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self._written[row].append(token)
        return [
            self._written[row][-1] not in self._limits.end_ids and len(self._written[row]) < self._budgets[row]
            for row in rows
        ]

    def _forward(self, cache: SlotCache, new: NewTokens) -> torch.Tensor:
        """Give the logits after new tokens, [rows, vocabulary]; `cache` has their keys and values then."""
        if self._waits:
            self._does_any_go_on(True)
        return next_logits(self._model, cache, new.to(self._device, self._model.dtype))

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def _does_any_go_on(self, this_one: bool) -> bool:
        """Tell all ranks whether this one runs a forward of its own, and give whether any does. A collective."""
        number = torch.tensor(int(this_one), device=self._device)
        dist.all_reduce(number)
        return bool(number)
