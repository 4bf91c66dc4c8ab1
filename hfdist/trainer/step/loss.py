"""What a loss counts: so that the losses of micro batches of any size add up to that of the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import find_batch_size

from hfdist.data.packing.sequence import IGNORED

NUM_ROWS = "hfdist_num_rows"
"""Where a batch without labels says how many of its rows count."""


def num_input_tokens(batch: Any) -> int:
    """Count the tokens that a model reads; 0 for batches of another form, such as those of rewards."""
    # A dict is a Mapping, but told much faster.
    return batch["input_ids"].numel() if isinstance(batch, (dict, Mapping)) and "input_ids" in batch else 0


def is_target(labels: torch.Tensor) -> torch.Tensor:
    """Tell labels from what stands in their place where there is none: NaN among floats, -100 among integers."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def ignored_like(labels: torch.Tensor) -> torch.Tensor:
    """Give labels of the same shape, none of which is a target."""
    return torch.full_like(labels, torch.nan if labels.is_floating_point() else IGNORED)


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a loss weighs what it is a mean of."""

    label_names: tuple[str, ...] = ("labels",)
    """Of what a batch may hold to compare with; the first one found is counted."""
    is_of_tokens: bool = False
    """Whether each target is a token, or the like: one of many in a row."""
    shifts: bool
    """Whether position t + 1 is the target of position t, so that the first label of a row is none."""
    moves: bool = False
    """Whether labels are moved to the tokens before them, since the data want the next token and the loss does not."""
    divides: bool
    """Whether the loss is a sum divided by `num_items_in_batch`; else it is a mean, whatever that number is."""

    def labels(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Find what is counted; None: the batch has nothing of the kind."""
        found = (batch[name] for name in self.label_names if name in batch)
        return next((labels for labels in found if isinstance(labels, torch.Tensor)), None)

    def weight(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Count the targets; without labels, the rows."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = self.labels(batch)
            if labels is None:
                return batch[NUM_ROWS] if NUM_ROWS in batch else torch.tensor(find_batch_size(batch) or 1)
            if (self.shifts or self.moves) and labels.ndim > 1:
                labels = labels[:, 1:]
        return is_target(labels).sum()

    def prepared(self, batch: Mapping[str, Any], weight: torch.Tensor) -> dict[str, Any]:
        """Give a batch of which the mean over its targets can be computed.

        One without any target gets arbitrary ones: their mean is a number, and so is 0 times it.
        """
        changed = {}
        for name in self.label_names:
            labels = batch.get(name)
            if isinstance(labels, torch.Tensor):
                if self.moves and labels.ndim > 1:
                    labels = torch.cat([labels[:, 1:], ignored_like(labels[:, :1])], 1)
                changed[name] = labels.masked_fill(weight == 0, 0)
        return {name: value for name, value in {**batch, **changed}.items() if name != NUM_ROWS}
