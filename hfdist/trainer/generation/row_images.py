"""The images of rows that are continued: what each forward takes of them beside the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hfdist.data.tokenization.image_tokens import ImageTokens, stack_inputs
from hfdist.strategies.engine import Batch


@dataclass(frozen=True)
class RowImages:
    """The images of some rows."""

    tokens: ImageTokens
    """What images of the run become."""
    rows: Sequence[Mapping[str, torch.Tensor]]
    """What a forward takes of the images of each row, empty without one; the first axis is of images or patches."""

    def part(self, some: slice) -> RowImages:
        """Give those of some of the rows."""
        return RowImages(self.tokens, self.rows[some])

    def batch(self, ids: torch.Tensor, num_prompt_tokens: Sequence[int]) -> Batch:
        """Give what a forward takes besides `ids`, of shape [rows, tokens]; images stand in prompts alone."""
        made = stack_inputs([row for row in self.rows if row])
        if self.tokens.kinds is None:
            return made
        are_of_prompt = torch.arange(ids.shape[1]) < torch.tensor(num_prompt_tokens)[:, None]
        are_features = torch.isin(ids, torch.from_numpy(self.tokens.ids)) & are_of_prompt
        return made | {self.tokens.kinds: are_features.long()}

    @property
    def fill_id(self) -> int:
        """A token that stands for no feature."""
        return next(number for number in range(len(self.tokens.ids) + 1) if number not in self.tokens.ids)
