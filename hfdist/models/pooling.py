"""The embedding of each text: one of the hidden states of its tokens, or their mean."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hfdist.config.task import Pooling


class TextTokens(NamedTuple):
    """Which tokens are of which text; tokens are numbered through all rows of a batch."""

    first: torch.Tensor
    """The first token of each text; shape [texts]."""
    last: torch.Tensor
    """The last one; shape [texts]."""
    of_token: torch.Tensor
    """The number of the text that each token is of, and one more than the last for tokens of none; shape [tokens]."""


def pool_texts(states: torch.Tensor, texts: TextTokens, pooling: Pooling) -> torch.Tensor:
    """Give the embedding of each text; shape [texts, width].

    Args:
        states: hidden states of all tokens; shape [tokens, width].
        texts: at least one.
        pooling: not `auto`.
    """
    if pooling is Pooling.last:
        return states[texts.last]
    if pooling is Pooling.cls:
        return states[texts.first]
    # What is no text goes to a last one, which is left out.
    sums = states.new_zeros(len(texts.last) + 1, states.shape[1]).index_add(0, texts.of_token, states)
    return (sums / torch.bincount(texts.of_token, minlength=len(sums)).clamp(min=1)[:, None])[:-1]
