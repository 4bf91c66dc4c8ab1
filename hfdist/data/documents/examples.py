"""Prompts and their continuations, cut out of the items of a held-out set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from hfdist.data.documents.held_out import HeldOutSet, HeldOutSources
from hfdist.data.documents.held_out_images import HeldOutImages
from hfdist.data.packing.sequence import IGNORED

_FEWEST_TOKENS = 4
"""Tokens of the shortest document that is split: each half has two."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt, and its continuation in the data, which is the reference of what a model should say."""

    prompt: list[int]
    """Token ids of the prompt."""
    reference: list[int]
    """Token ids of the continuation."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, where they are kept."""
    images: Callable[[], Mapping[str, torch.Tensor]] = dict
    """Gives what a forward takes of the images of the prompt; the first axis is of images or patches.

    Those of what is held out are decoded at each call, as a run does not keep them. DataError: they cannot be read.
    """


def take_examples(held_out: object, num_examples: int, *, with_images: bool = False) -> list[Example]:
    """Give the first examples of a held-out set; of a set of several sources about equally many of each source.

    `held_out` is a sequence of items, which have `input_ids` and `labels` of shape [tokens], and `position_ids` where
    they hold several documents. Without `with_images`, items that have images are passed over.
    """
    parts = list(held_out.parts.values()) if isinstance(held_out, HeldOutSources) else [held_out]
    share, num_larger = divmod(num_examples, len(parts))
    examples: list[Example] = []
    for place, part in enumerate(parts):
        num_wanted = share + 1 if place < num_larger else share
        examples += islice(_examples(part, with_images), num_wanted)
    return examples


def _examples(items: Any, with_images: bool) -> Iterator[Example]:
    """Give the examples of the items of one source; `items` may be any sequence, also a user's own."""
    for index in range(len(items)):
        has_image = isinstance(items, HeldOutImages) and items.has_image(index)
        if has_image and not with_images:
            continue
        item = items[index]
        images = partial(items.images_of, index) if has_image else dict
        columns = items.columns(index) if isinstance(items, HeldOutSet) else iter(())
        for ids, labels in documents_of(item):
            example = split_document(ids, labels)
            # Each document takes its columns, also one that gives no example.
            columns_of_row = next(columns, {})
            if example is not None:
                yield replace(example, columns=columns_of_row, images=images)


def documents_of(item: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Give token ids and labels of each document of an item: a document begins where positions restart at 0."""
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    starts = [0]
    if "position_ids" in item:
        starts = [place for place, position in enumerate(item["position_ids"].tolist()) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield ids[start:stop], labels[start:stop]


def split_document(ids: list[int], labels: list[int]) -> Example | None:
    """Give what comes before the first target as the prompt, and the first run of targets as the reference.

    A document of which all tokens are targets, as of plain text, gives its first half and its second half. None: the
    document has no target, or fewer than 4 tokens.
    """
    # The very first token is never a target.
    targets = [place for place in range(1, len(ids)) if labels[place] != IGNORED]
    if not targets or len(ids) < _FEWEST_TOKENS:
        return None
    first = targets[0]
    stop = next((place for place in range(first, len(ids)) if labels[place] == IGNORED), len(ids))
    if first == 1 and stop > targets[-1]:
        # All of the document is one run of targets; tokens after it only fill the item up.
        first = stop // 2
    return Example(prompt=ids[:first], reference=ids[first:stop])
