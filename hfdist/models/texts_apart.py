"""Takes packed rows apart, so that each text has a row of its own: texts of one row would see each other in encoders.

    row 0   a a a b b           ids [texts, longest]   a a a .     mask   1 1 1 0
    row 1   c c c c .                                  b b . .            1 1 0 0
                                                       c c c c            1 1 1 1

A model then reads a text as it reads any batch of padded texts: positions, segments and masks are those of its own
type, whatever they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TextsApart:
    """The places of the tokens of texts, both in a packed batch and in rows of one text each."""

    tokens: torch.Tensor
    """Places of the texts' tokens among all tokens of the batch, in order; shape [tokens of texts]."""
    texts: torch.Tensor
    """Numbers of the texts to which these tokens belong; shape [tokens of texts]."""
    places: torch.Tensor
    """Places of these tokens in their texts; shape [tokens of texts]."""
    mask: torch.Tensor
    """1 at tokens, 0 at padding; shape [texts, longest]."""

    @classmethod
    def of(cls, is_first: torch.Tensor, is_text: torch.Tensor) -> TextsApart:
        """Find the texts of packed rows.

        Args:
            is_first: whether a token is the first one of a text; shape [rows, tokens]. True for the first token of
                each row.
            is_text: whether a token belongs to a text; shape [rows, tokens]. No other token stands between those of one
                text. If the batch has no text at all, its first token counts as one, so that the model has something
                to read.
        """
        is_text, is_first = is_text.flatten(), is_first.flatten()
        if not bool(is_text.any()):
            is_text = torch.zeros_like(is_text)
            is_text[0] = True
        tokens = is_text.nonzero()[:, 0]
        _, texts = torch.unique_consecutive(is_first.cumsum(0)[tokens], return_inverse=True)
        lengths = torch.bincount(texts)
        places = torch.arange(len(tokens), device=tokens.device) - (lengths.cumsum(0) - lengths)[texts]
        mask = (torch.arange(int(lengths.max()), device=tokens.device) < lengths[:, None]).long()
        return cls(tokens, texts, places, mask)

    def take_apart(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Give values of tokens, of shape [rows, tokens], text by text, filled up; shape [texts, longest]."""
        apart = values.new_full(self.mask.shape, fill)
        apart[self.texts, self.places] = values.flatten()[self.tokens]
        return apart

    def put_back(self, values: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Put values of texts back at the places of their tokens in the batch; all other places get 0.

        Args:
            values: values of shape [texts, longest, ...].
            num_tokens: number of tokens in all rows of the batch.

        Returns:
            Values of shape [num_tokens, ...].
        """
        back = values.new_zeros(num_tokens, *values.shape[2:])
        return back.index_copy(0, self.tokens, values[self.texts, self.places])
