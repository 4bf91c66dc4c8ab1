"""Labels of a text as tokens that stand after it; they are the targets of a row, and the text is context.

one label of several      number
some labels of several    0, then the number of each + 1: so a text may have none of them
a number                  upper and lower 16 bits of a float32
tags of tokens            for each token its number + 1, or 0 where it has none

text      ~a ~b ~c | 3            ~(id | REJECTED) is context of the second text of a pair
ranking   ~a ~b ~c | 1 | ~a ~d | 0
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


def of_classes(numbers: Sequence[int], problem: ProblemType) -> LabelTokens:
    """Give the tokens of one class, or of several."""
    if problem is ProblemType.single_label_classification:
        return list(numbers)
    return [0, *(number + 1 for number in sorted(set(numbers)))]


def of_number(value: float) -> LabelTokens:
    """Give the tokens of a number, as a float32."""
    bits = int(np.float32(value).view(np.uint32))
    return [bits >> 16, bits & 0xFFFF]


def of_tags(numbers: Sequence[int | None]) -> LabelTokens:
    """Give the tokens of the tags of a text's tokens."""
    return [0 if number is None else number + 1 for number in numbers]


def with_labels(ids: Sequence[int], segments: Sequence[int] | None, labels: LabelTokens) -> Tokens:
    """Put labels after a text.

    Args:
        ids: of the text's tokens.
        segments: 1 at tokens of the second text of a pair; None: there is one text.
        labels: tokens of labels.
    """
    marks = np.array(ids, dtype=np.int32)
    if segments is not None:
        marks |= np.array(segments, dtype=np.int32) * REJECTED
    return np.concatenate([~marks, np.array(labels, dtype=np.int32)])


def to_classes(tokens: torch.Tensor, problem: ProblemType, num_labels: int) -> torch.Tensor:
    """Read what `of_classes` or `of_number` wrote.

    Args:
        tokens: of each text, -1 after its last; shape [texts, most].
        problem: of the labels.
        num_labels: of the model.

    Returns:
        Numbers of classes, shape [texts]; ones and zeros, shape [texts, num_labels]; or numbers, shape [texts].
    """
    if problem is ProblemType.single_label_classification:
        return tokens[:, 0]
    if problem is ProblemType.regression:
        if not len(tokens):
            return torch.zeros(0, device=tokens.device)
        bits: NDArray[np.uint32] = (tokens[:, 0] << 16 | tokens[:, 1]).cpu().numpy().astype(np.uint32)
        return torch.from_numpy(bits.view(np.float32)).to(tokens.device)
    classes = torch.zeros(len(tokens), num_labels + 1, device=tokens.device)
    # The first column, which is dropped, takes what is no token, and the token that is always there.
    return classes.scatter(1, tokens.clamp(min=0), 1.0)[:, 1:]


def to_tags(tokens: torch.Tensor) -> torch.Tensor:
    """Read what `of_tags` wrote, -1 after the last; IGNORED where there is no tag. The shape stays."""
    return torch.where(tokens > 0, tokens - 1, IGNORED)
