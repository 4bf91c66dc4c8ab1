"""Labels written as tokens after a text: they are the targets of a row, and the tokens of the text are context.

one label of several      its number
some labels of several    0, then the number of each + 1: so a text may have none of them
a number                  upper and lower 16 bits of a float32
tags of tokens            for each token of the text the number of its tag + 1, or 0 where it has none

A text with the tokens a, b, c and the label 3, and a query with two documents, which have the labels 1 and 0:

text      ~a ~b ~c  3             a token of the second text of a pair is ~(id | REJECTED)
ranking   ~a ~b ~c  1  ~a ~d  0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hfdist.config.batch import IGNORED
from hfdist.config.data import ProblemType
from hfdist.data.marks import REJECTED, Tokens

LabelTokens = list[int]
"""Tokens that stand for the label, or the labels, of a text."""


def of_classes(numbers: Sequence[int], problem: ProblemType) -> LabelTokens:
    """Write the numbers of classes as tokens: one class, or with other problems any number of them."""
    if problem is ProblemType.single_label_classification:
        return list(numbers)
    return [0, *(number + 1 for number in sorted(set(numbers)))]


def of_number(value: float) -> LabelTokens:
    """Write a number as tokens, with the precision of float32."""
    bits = int(np.float32(value).view(np.uint32))
    return [bits >> 16, bits & 0xFFFF]


def of_tags(numbers: Sequence[int | None]) -> LabelTokens:
    """Write the tags of a text's tokens as tokens; `numbers` has the number of each tag, and None for no tag."""
    return [0 if number is None else number + 1 for number in numbers]


def with_labels(ids: Sequence[int], segments: Sequence[int] | None, labels: LabelTokens) -> Tokens:
    """Put the tokens of labels after those of a text, which become context; shape [tokens of both].

    Args:
        ids: Ids of the text's tokens.
        segments: For each token 1 if it is of the second text of a pair, else 0; None: there is one text.
        labels: Tokens of the labels.
    """
    marked = np.array(ids, dtype=np.int32)
    if segments is not None:
        marked |= np.array(segments, dtype=np.int32) * REJECTED
    return np.concatenate([~marked, np.array(labels, dtype=np.int32)])


def to_classes(tokens: torch.Tensor, problem: ProblemType, num_labels: int) -> torch.Tensor:
    """Read the labels that `of_classes` or `of_number` wrote, in the form that the loss of the problem takes.

    Args:
        tokens: Tokens of the labels of each text, -1 after the last of them; shape [texts, most].
        problem: Kind of the labels.
        num_labels: Number of labels of the model.

    Returns:
        For one label of several its number, shape [texts]; for some of several 1.0 where a text has the label and else
        0.0, shape [texts, num_labels]; for numbers the numbers, shape [texts].
    """
    if problem is ProblemType.single_label_classification:
        return tokens[:, 0]
    if problem is ProblemType.regression:
        if not len(tokens):
            return torch.zeros(0, device=tokens.device)
        bits: NDArray[np.uint32] = (tokens[:, 0] << 16 | tokens[:, 1]).cpu().numpy().astype(np.uint32)
        return torch.from_numpy(bits.view(np.float32)).to(tokens.device)
    classes = torch.zeros(len(tokens), num_labels + 1, device=tokens.device)
    # Column 0, which is dropped, takes the token 0 of each text and the -1 after the last token.
    return classes.scatter(1, tokens.clamp(min=0), 1.0)[:, 1:]


def to_tags(tokens: torch.Tensor) -> torch.Tensor:
    """Read the tags that `of_tags` wrote, with -1 after the last; IGNORED where there is none. The shape stays."""
    return torch.where(tokens > 0, tokens - 1, IGNORED)
