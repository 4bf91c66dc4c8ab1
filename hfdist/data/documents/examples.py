"""Prompts and their continuations, from the items of a held-out set."""

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


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a prompt, and of its continuation in the data."""

    prompt: list[int]
    reference: list[int]
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, where they are kept."""
    images: Callable[[], Mapping[str, torch.Tensor]] = dict
    """Gives what a forward takes of the images of the prompt; the first axis is of images or patches.

    Those of what is held out are decoded at each call, as a run does not keep them. DataError: they cannot be read.
    """


def take_examples(held_out: object, num_examples: int, *, with_images: bool = False) -> list[Example]:
    """Give the first examples of a held-out set; of several sources about equally many of each.

    Items have `input_ids` and `labels` of shape [tokens], and `position_ids` where they hold several documents.
    Without `with_images` those that have images are passed over.
    """
    parts = list(held_out.parts.values()) if isinstance(held_out, HeldOutSources) else [held_out]
    shares = [num_examples // len(parts) + (place < num_examples % len(parts)) for place in range(len(parts))]
    found = (islice(_examples(part, with_images), share) for part, share in zip(parts, shares, strict=True))
    return [example for own in found for example in own]


def _examples(items: Any, with_images: bool) -> Iterator[Example]:
    for index in range(len(items)):
        has_image = isinstance(items, HeldOutImages) and items.has_image(index)
        if has_image and not with_images:
            continue
        item = items[index]
        images = partial(items.images_of, index) if has_image else dict
        columns = items.columns(index) if isinstance(items, HeldOutSet) else iter(())
        for ids, labels in documents_of(item):
            example, own = split_document(ids, labels), next(columns, {})
            if example is not None:
                yield replace(example, columns=own, images=images)


def documents_of(item: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Give token ids and labels of each document of an item: where positions restart, one begins."""
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    positions = item["position_ids"].tolist() if "position_ids" in item else [0] + [1] * (len(ids) - 1)
    starts = [place for place, position in enumerate(positions) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield ids[start:stop], labels[start:stop]


def split_document(ids: list[int], labels: list[int]) -> Example | None:
    """Give what comes before the first target as the prompt, and the first run of targets as the reference.

    A document of which all is to be learned, as plain text is, gives its first half and its second. None: the document
    has no target, or fewer than 4 tokens.
    """
    # The very first token is never a target.
    targets = [place for place in range(1, len(ids)) if labels[place] != IGNORED]
    if not targets or len(ids) < _FEWEST_TOKENS:
        return None
    first = targets[0]
    stop = next((place for place in range(first, len(ids)) if labels[place] == IGNORED), len(ids))
    if first == 1 and stop > targets[-1]:
        # All is one run of targets; what follows it fills up.
        first = stop // 2
    return Example(prompt=ids[:first], reference=ids[first:stop])
