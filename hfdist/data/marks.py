"""What a token of an example says besides its id: whether it is a target, and where a second document begins.

An example is one array, so that caches, packing and cursors treat it as they treat a document. A preference is one
array, too: two documents, the chosen answer after its prompt, and the rejected one after the same prompt. So is a query
with its texts: a document each, of which all tokens are targets, and those of the texts have the mark of rejected ones.

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
_ID = IMAGE - 1

_FIRST_REJECTED = IGNORED - 1
"""The label of token 0 as a target of a rejected answer; token n has n less."""

Tokens = NDArray[np.int32]


def reject(tokens: Tokens) -> Tokens:
    """Let the targets of a document be those of a rejected answer."""
    return np.where(tokens >= 0, ~(tokens | REJECTED), tokens)


def join(first: Tokens, second: Tokens) -> Tokens:
    """Put two documents into one example. The first token of a document has nothing before it, so it is no target."""
    is_image, second = are_images(second[:1]), second.copy()
    second[:1] = ~(ids_of(second[:1]) | BEGINS | np.where(is_image, IMAGE, 0).astype(np.int32))
    return np.concatenate([first, second])


def ids_of(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Token ids, signed."""
    # Wide enough for labels; none is context.
    tokens = tokens.astype(np.int32) if tokens.dtype.kind == "u" else tokens
    return np.where(tokens < 0, ~tokens & _ID, tokens)


def are_targets(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which tokens are targets, of any answer."""
    if tokens.dtype.kind == "u":
        return np.ones(len(tokens), dtype=bool)
    return (tokens >= 0) | ((~tokens & REJECTED) != 0)


def are_images(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which tokens stand for features of images."""
    if tokens.dtype.kind == "u":
        return np.zeros(len(tokens), dtype=bool)
    return (tokens < 0) & ((~tokens & IMAGE) != 0)


def begin(tokens: NDArray[np.integer]) -> NDArray[np.intp]:
    """Places at which a second document of an example begins."""
    return np.flatnonzero((tokens < 0) & ((~tokens & BEGINS) != 0))


def labels_of(tokens: NDArray[np.integer], ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Labels: the id of a target, less than IGNORED for one of a rejected answer, and IGNORED elsewhere."""
    labels = np.where(tokens < 0, ids.dtype.type(IGNORED), ids)
    return np.where((tokens < 0) & ((~tokens & REJECTED) != 0), _FIRST_REJECTED - ids, labels)


def reject_labels(labels: torch.Tensor) -> torch.Tensor:
    """Let plain labels be those of a rejected answer; the shape stays."""
    return labels.where(labels == IGNORED, _FIRST_REJECTED - labels)


def split_labels(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give plain labels, and which of them are of rejected answers; both of the shape of `labels`, a tensor."""
    is_rejected = labels < IGNORED
    return labels.where(~is_rejected, _FIRST_REJECTED - labels), is_rejected
