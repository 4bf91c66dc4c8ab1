"""Tags of words by logistic regression: what an encoder has to beat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy, embedding_bag

_DECAY = 1e-3
"""Of the squared weights, against overfitting."""


class TaggedWord(NamedTuple):
    """A word that has a tag, in its row."""

    words: list[str]
    """Of the whole row."""
    place: int
    """Of the word."""
    tag: str


def read_tagged(path: Path) -> list[TaggedWord]:
    """Give the words of a file of rows with `tokens` and `tags`, but those without a tag."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [TaggedWord(row["tokens"], index, tag) for row in rows for index, tag in enumerate(row["tags"]) if tag]


def linear_accuracy(
    labelled: Sequence[TaggedWord], tested: Sequence[TaggedWord], features: Callable[[TaggedWord], Iterable[str]]
) -> float:
    """Learn from words a weight for each feature and tag; give the share of the tested words whose tag is right."""
    numbers = dict(zip(sorted({name for word in labelled for name in features(word)}), count()))
    tags = sorted({word.tag for word in labelled})

    def encode(words: Sequence[TaggedWord]) -> tuple[torch.Tensor, torch.Tensor]:
        known = [[numbers[name] for name in features(word) if name in numbers] for word in words]
        lengths = torch.tensor([0, *map(len, known)])[:-1]
        return torch.tensor([number for one in known for number in one]), lengths.cumsum(0)

    weights = torch.zeros(len(numbers), len(tags), requires_grad=True)
    inputs, expected = encode(labelled), torch.tensor([tags.index(word.tag) for word in labelled])

    def scores(bags: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        numbers_of_all, begins = bags
        return embedding_bag(numbers_of_all, weights, begins, mode="sum")

    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(scores(inputs), expected) + _DECAY * (weights**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        found = scores(encode(tested)).argmax(1).tolist()
    return sum(tags[one] == word.tag for one, word in zip(found, tested, strict=True)) / len(tested)
