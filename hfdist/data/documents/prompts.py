"""Held-out documents as prompts to continue, each with what stands there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hfdist.data.documents.held_out import HeldOutSources
from hfdist.data.packing.sequence import IGNORED

_FEWEST_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a prompt, and of its continuation in the data."""

    prompt: list[int]
    reference: list[int]


def take_examples(held_out: Any, num_examples: int) -> list[Example]:
    """Give the first examples of a held-out set; of several sources about equally many of each.

    Args:
        held_out: items of `input_ids` and `labels`, and of `position_ids` where items hold several documents; each of
            shape [tokens].
        num_examples: at the most.
    """
    parts = list(held_out.parts.values()) if isinstance(held_out, HeldOutSources) else [held_out]
    shares = [num_examples // len(parts) + (place < num_examples % len(parts)) for place in range(len(parts))]
    return [example for part, share in zip(parts, shares, strict=True) for example in islice(_examples(part), share)]


def _examples(items: Any) -> Iterator[Example]:
    for index in range(len(items)):
        for ids, labels in documents_of(items[index]):
            example = split_document(ids, labels)
            if example is not None:
                yield example


def documents_of(item: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Give token ids and labels of each document of an item: where positions restart, one begins."""
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    positions = item["position_ids"].tolist() if "position_ids" in item else [0] + [1] * (len(ids) - 1)
    starts = [place for place, position in enumerate(positions) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield ids[start:stop], labels[start:stop]


def split_document(ids: Sequence[int], labels: Sequence[int]) -> Example | None:
    """Give what comes before the first target as the prompt, and the first run of targets as the reference.

    Of a document of which all is to be learned, as of plain text: its first half, and its second. None: it has no
    target, or hardly any tokens.
    """
    targets = [place for place, label in enumerate(labels) if label != IGNORED]
    if not targets or len(ids) < _FEWEST_TOKENS:
        return None
    first = targets[0]
    if first <= 1:
        # The very first token is never a target.
        first = len(ids) // 2
    stop = next((place for place in range(first, len(ids)) if labels[place] == IGNORED), len(ids))
    return Example(prompt=list(ids[:first]), reference=list(ids[first:stop])) if stop > first else None
