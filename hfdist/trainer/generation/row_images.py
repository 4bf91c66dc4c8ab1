"""The images of rows that are continued: what forwards take of them beside the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hfdist.data.packing.packed_images import make_trial
from hfdist.data.tokenization.image_tokens import ImageTokens, stack_inputs
from hfdist.models.cache_check import NUM_NEW_TOKENS, CacheTrial
from hfdist.models.new_tokens import PromptRows
from hfdist.strategies.engine import Batch


@dataclass(frozen=True)
class RowImages:
    """The images of some rows; they stand in prompts alone."""

    tokens: ImageTokens
    """What images of the run become."""
    rows: Sequence[Mapping[str, torch.Tensor]]
    """What a forward takes of the images of each row, empty without one; the first axis is of images or patches.

    Rows of the same prompt have the same object, by which the prompt is read once.
    """

    def part(self, some: slice) -> RowImages:
        """Give those of some of the rows."""
        return RowImages(self.tokens, self.rows[some])

    def stack(self) -> Batch:
        """Give what a forward takes of all images, beside what it takes of tokens."""
        return stack_inputs([row for row in self.rows if row])

    def kinds(self, prompts: Sequence[Sequence[int]]) -> dict[str, list[torch.Tensor]]:
        """Give which tokens of each prompt stand for images, shape [tokens], by the forward's name, if it asks."""
        if self.tokens.kinds is None:
            return {}
        return {self.tokens.kinds: [torch.from_numpy(self.tokens.are_features(ids)).long() for ids in prompts]}

    def prompt_rows(self, prompts: Sequence[Sequence[int]]) -> PromptRows:
        """Give the prompts of the rows as a cache reads them."""
        kinds, find, positions = self.kinds(prompts), self.tokens.positions, None
        if find is not None:
            found: dict[tuple[int, ...], torch.Tensor] = {}
            positions = []
            for row, (prompt, seen) in enumerate(zip(prompts, self.rows, strict=True)):
                key = (id(seen), *prompt)
                if key not in found and seen:
                    of_tokens = {name: own[row][None] for name, own in kinds.items()}
                    found[key] = find({"input_ids": torch.tensor([list(prompt)]), **of_tokens, **seen})[:, 0]
                elif key not in found:
                    found[key] = torch.arange(len(prompt)).expand(3, -1)
                positions.append(found[key])
        return PromptRows(prompts, self.fill_id, self.rows, stack_inputs, kinds, positions)

    @property
    def fill_id(self) -> int:
        """A token that stands for no feature."""
        return next(number for number in range(len(self.tokens.ids) + 1) if number not in self.tokens.ids)


def make_cache_trial(images: ImageTokens) -> CacheTrial:
    """Make rows with one, no and two images, by which a cache is tried."""
    rows = [{name: own for name, own in batch.items() if name != "labels"} for batch in make_trial(images).alone]
    seen = [{name: own for name, own in row.items() if name not in images.text_names} for row in rows]
    prompts = [row["input_ids"][0, :-NUM_NEW_TOKENS].tolist() for row in rows]
    return CacheTrial(rows, RowImages(images, seen).prompt_rows(prompts))
