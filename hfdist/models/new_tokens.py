"""What a model with a slot cache reads next of some rows: their whole prompts, or a token of each.

prompts            fill  what   I   I   I   I   ?        padded on the left
                     I     I   I   I  is this   ?
text                 0     0   1   2   3   4   5        positions of the first row
height               0     0   1   1   2   2   3        the model's own, of an image of 2 x 2 features
shift                0     0   0  -1  -1  -2  -2        a position of height is that of text and its shift

The tokens after a prompt have the shift of its end, which is -2 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad


class NewTokens(NamedTuple):
    """The next tokens of some rows."""

    ids: torch.Tensor
    """Shape [rows, new tokens], padded on the left."""
    lengths: torch.Tensor
    """Number of tokens of each row, with those before, and without what pads it; shape [rows]."""
    seen: Mapping[str, torch.Tensor]
    """What the forward takes of the images among them, beside their positions."""
    shifts: torch.Tensor | None
    """What is added to positions of text; shape [3, rows, new tokens]. None: the model has no others."""

    def to(self, device: torch.device, dtype: torch.dtype) -> NewTokens:
        """Give them on a device; pixels also in a type, that of the weights which read them."""
        seen = {
            name: values.to(device, dtype if values.is_floating_point() else None) for name, values in self.seen.items()
        }
        shifts = None if self.shifts is None else self.shifts.to(device)
        return NewTokens(self.ids.to(device), self.lengths.to(device), seen, shifts)


@dataclass(frozen=True)
class PromptRows:
    """The prompts of rows, and what a forward takes of their images."""

    ids: Sequence[Sequence[int]]
    """Tokens of each row."""
    fill_id: int = 0
    """A token that stands for no feature."""
    images: Sequence[Mapping[str, torch.Tensor]] = ()
    """What a forward takes of the images of each row; empty: no row has any."""
    stack: Callable[[Sequence[Mapping[str, torch.Tensor]]], Mapping[str, torch.Tensor]] | None = None
    """Puts those of several rows one after the other; None: no row has any."""
    kinds: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    """By the forward's name: which tokens of each row stand for images; shape [tokens]."""
    positions: Sequence[torch.Tensor] | None = None
    """Of time, height and width, of each row, shape [3, tokens]; None: the model has those of text alone."""

    def read(self, rows: Sequence[int]) -> NewTokens:
        """Give whole prompts."""
        lengths = [len(self.ids[row]) for row in rows]
        ids = _pad_left([torch.tensor(self.ids[row]) for row in rows], self.fill_id)
        kinds = {name: _pad_left([own[row] for row in rows]) for name, own in self.kinds.items()}
        shifts = None
        if self.positions is not None:
            shifts = _pad_left([self.positions[row] - torch.arange(len(self.ids[row])) for row in rows])
        return NewTokens(ids, torch.tensor(lengths), {**self._seen(rows), **kinds}, shifts)

    def _seen(self, rows: Sequence[int]) -> Mapping[str, torch.Tensor]:
        own = [self.images[row] for row in rows if self.images and self.images[row]]
        return {} if self.stack is None else self.stack(own)

    def number(self) -> list[int]:
        """Give a number for each row: the same for neighbours with the same prompt and the same images.

        Images are compared by identity: others may have as many tokens.
        """

        def is_as_before(row: int) -> bool:
            has_same_images = not self.images or self.images[row] is self.images[row - 1]
            return has_same_images and self.ids[row] == self.ids[row - 1]

        return list(accumulate((not is_as_before(row) for row in range(1, len(self.ids))), initial=0))

    def step(self, rows: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> NewTokens:
        """Give a token of each of these rows, which come after their prompts; `lengths` are those with them."""
        shifts = None
        if self.positions is not None:
            # As the types count on: after the largest position of the three.
            ends = [int(self.positions[row].max()) + 1 - len(self.ids[row]) for row in rows]
            shifts = torch.tensor(ends)[:, None].repeat(3, 1, 1)
        return NewTokens(torch.tensor(tokens)[:, None], torch.tensor(lengths), {}, shifts)


def _pad_left(rows: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
    """Stack tensors of shape [..., tokens] as [..., rows, tokens]."""
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([pad(row, (longest - row.shape[-1], 0), value=value) for row in rows], -2)
