"""Marks in the bits of a token: whether it is a target or an image, and where another document of an example begins.

An example is one array of tokens, so that caches, packing and cursors treat it as they treat a document. A preference
is one array, too: two documents, which are the prompt with the chosen answer, and the same prompt with the rejected
one. So is a query with its texts: each is a document of which all tokens are targets, and the tokens of the texts have
the mark of a rejected answer.

token               id, a target
~id                 context
~(id | REJECTED)    a target of a rejected answer
~(id | BEGINS)      context, and the first token of another document of the same example
~(id | IMAGE)       context, whose embedding is a feature of an image
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hfdist.config.batch import IGNORED

IMAGE, REJECTED, BEGINS = 1 << 28, 1 << 29, 1 << 30
"""Bits of the marks, above those of an id."""
_ID = IMAGE - 1
"""Bits of an id."""
_FIRST_REJECTED = IGNORED - 1
"""Label of token 0 as a target of a rejected answer; that of token n is n less."""

Tokens = NDArray[np.int32]
"""Tokens of an example with their marks; shape [tokens]."""


def reject(tokens: Tokens) -> Tokens:
    """Mark the targets of a document as those of a rejected answer."""
    return np.where(tokens >= 0, ~(tokens | REJECTED), tokens)


def join(first: Tokens, second: Tokens) -> Tokens:
    """Join two documents into one example; the first token of the second one is marked, and becomes context.

    It cannot be a target, since no token of its document stands before it.
    """
    begin_token = second[:1]
    image_bit = np.where(are_images(begin_token), IMAGE, 0).astype(np.int32)
    marked = ~(ids_of(begin_token) | BEGINS | image_bit)
    return np.concatenate([first, marked.astype(np.int32), second[1:]])


def ids_of(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Give the ids of tokens, without marks, in a signed type; the shape stays."""
    # Unsigned tokens are all targets without marks. A signed type also holds labels.
    tokens = tokens.astype(np.int32) if tokens.dtype.kind == "u" else tokens
    return np.where(tokens < 0, ~tokens & _ID, tokens)


def are_targets(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Tell which tokens are targets, of chosen or rejected answers; the shape stays."""
    if tokens.dtype.kind == "u":
        return np.ones(len(tokens), dtype=bool)
    return (tokens >= 0) | ((~tokens & REJECTED) != 0)


def are_images(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Tell which tokens stand for features of images; the shape stays."""
    if tokens.dtype.kind == "u":
        return np.zeros(len(tokens), dtype=bool)
    return (tokens < 0) & ((~tokens & IMAGE) != 0)


def begin(tokens: NDArray[np.integer]) -> NDArray[np.intp]:
    """Give the places at which further documents of examples begin; shape [further documents]."""
    return np.flatnonzero((tokens < 0) & ((~tokens & BEGINS) != 0))


def labels_of(tokens: NDArray[np.integer], ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Give the labels of tokens with the given ids; the shape stays.

    The label of a target is its id, that of a target of a rejected answer is less than IGNORED, and others are IGNORED.
    """
    labels = np.where(tokens < 0, ids.dtype.type(IGNORED), ids)
    return np.where((tokens < 0) & ((~tokens & REJECTED) != 0), _FIRST_REJECTED - ids, labels)


def reject_labels(labels: torch.Tensor) -> torch.Tensor:
    """Turn plain labels into those of a rejected answer; the shape stays."""
    return labels.where(labels == IGNORED, _FIRST_REJECTED - labels)


def split_labels(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give plain labels, and a tensor that tells which of them are of rejected answers; the shape stays."""
    is_rejected = labels < IGNORED
    return labels.where(~is_rejected, _FIRST_REJECTED - labels), is_rejected
