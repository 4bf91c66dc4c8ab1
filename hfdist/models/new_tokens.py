"""The input of a model with a slot cache: the whole prompts of some rows, or the next token of each row.

prompts            fill  what   I   I   I   I   ?        two rows, padded on the left; I: a feature of an image
                     I     I   I   I  is this   ?
text                 0     0   1   2   3   4   5        positions of the first row's tokens as text
height               0     0   1   1   2   2   3        positions of height, for an image of 2 x 2 features
shift                0     0   0  -1  -1  -2  -2        position of height = position of text + shift

The tokens after a prompt have the shift of its end, which is -2 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import pad


class NewTokens(NamedTuple):
    """The next tokens of some rows, as a forward reads them."""

    ids: torch.Tensor
    """Token ids, padded on the left; shape [rows, new tokens]."""
    lengths: torch.Tensor
    """Number of tokens of each row, with those before the new ones, without padding; shape [rows]."""
    seen: Mapping[str, torch.Tensor]
    """The forward's inputs for images among the new tokens, by name, but for positions."""
    shifts: torch.Tensor | None
    """Positions of time, height and width less those of text; shape [3, rows, new tokens]. None: the model has only
    those of text."""

    def to(self, device: torch.device, dtype: torch.dtype) -> NewTokens:
        """Give the tokens on a device; pixels also in the type `dtype`, that of the weights which read them."""
        seen = {
            name: values.to(device, dtype if values.is_floating_point() else None) for name, values in self.seen.items()
        }
        shifts = None if self.shifts is None else self.shifts.to(device)
        return NewTokens(self.ids.to(device), self.lengths.to(device), seen, shifts)


@dataclass(frozen=True)
class PromptRows:
    """The prompts of rows, and what a forward takes of their images."""

    ids: Sequence[Sequence[int]]
    """Token ids of each row."""
    fill_id: int = 0
    """Token id of padding, one that stands for no feature of an image."""
    images: Sequence[Mapping[str, torch.Tensor]] = ()
    """The forward's inputs for the images of each row, by name; empty: no row has images."""
    stack: Callable[[Sequence[Mapping[str, torch.Tensor]]], Mapping[str, torch.Tensor]] | None = None
    """Makes one set of inputs from the images of several rows; None: no row has images."""
    kinds: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Marks of the tokens that stand for images, of shape [tokens] for each row, by the name of the forward's input."""
    positions: Sequence[torch.Tensor] | None = None
    """Positions of time, height and width, of shape [3, tokens] for each row; None: the model has none but of text."""

    def read(self, rows: Sequence[int]) -> NewTokens:
        """Give the whole prompts of these rows."""
        lengths = [len(self.ids[row]) for row in rows]
        ids = _pad_left([torch.tensor(self.ids[row]) for row in rows], self.fill_id)
        kinds = {name: _pad_left([own[row] for row in rows]) for name, own in self.kinds.items()}
        shifts = None
        if self.positions is not None:
            shifts = _pad_left([self.positions[row] - torch.arange(len(self.ids[row])) for row in rows])
        return NewTokens(ids, torch.tensor(lengths), {**self._seen(rows), **kinds}, shifts)

    def _seen(self, rows: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Give the forward's inputs for the images of these rows."""
        if self.stack is None:
            return {}
        return self.stack([self.images[row] for row in rows if self.images and self.images[row]])

    def number(self) -> list[int]:
        """Number the different prompts: neighbours with the same tokens and the same images have one number.

        Images are compared by identity: other images may have as many tokens.
        """

        def is_as_before(row: int) -> bool:
            has_same_images = not self.images or self.images[row] is self.images[row - 1]
            return has_same_images and self.ids[row] == self.ids[row - 1]

        numbers = [0]
        for row in range(1, len(self.ids)):
            numbers.append(numbers[-1] if is_as_before(row) else numbers[-1] + 1)
        return numbers

    def step(self, rows: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> NewTokens:
        """Give one more token of each row, after its prompt.

        Args:
            rows: numbers of the rows.
            tokens: the token of each row.
            lengths: number of tokens of each row, with this one.
        """
        shifts = None
        if self.positions is not None:
            # Models count on from the largest of the three positions.
            ends = [int(self.positions[row].max()) + 1 - len(self.ids[row]) for row in rows]
            shifts = torch.tensor(ends)[:, None].repeat(3, 1, 1)
        return NewTokens(torch.tensor(tokens)[:, None], torch.tensor(lengths), {}, shifts)


def _pad_left(rows: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
    """Stack tensors of shape [..., tokens] as [..., rows, tokens]."""
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([pad(row, (longest - row.shape[-1], 0), value=value) for row in rows], -2)
