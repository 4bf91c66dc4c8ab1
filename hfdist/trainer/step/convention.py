"""What a loss counts in a batch, and how it divides by the count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate.utils import find_batch_size

from hfdist.data.packing.sequence import IGNORED
from hfdist.strategies.engine import Batch

NUM_ROWS = "hfdist_num_rows"
"""The key under which a batch without labels says how many of its rows count."""
_SHIFTED = "shift_labels"
"""The key of labels that a batch brings moved by one position already; a loss takes them in place of the others."""


def num_input_tokens(batch: object) -> int:
    """Count the tokens that a model reads; 0 for batches of another form, such as those of rewards."""
    # A dict is a Mapping too, but the check for dict is much faster.
    return batch["input_ids"].numel() if isinstance(batch, (dict, Mapping)) and "input_ids" in batch else 0


def is_target(labels: torch.Tensor) -> torch.Tensor:
    """Find which labels are targets: not NaN (floats), and not -100 (integers)."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def ignored_like(labels: torch.Tensor) -> torch.Tensor:
    """Make labels of the same shape that hold no target."""
    return torch.full_like(labels, torch.nan if labels.is_floating_point() else IGNORED)


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a loss counts, and how it divides by the count."""

    label_names: tuple[str, ...] = ("labels",)
    """The labels that a batch may hold; the first one found is counted."""
    is_of_tokens: bool = False
    """Whether each target is a token, one of many in a row."""
    shifts: bool
    """Whether label t + 1 is the target of position t; if so, the first label of a row is not a target."""
    moves: bool = False
    """Whether hfdist moves each label one position to the left, because the loss itself does not shift."""
    divides: bool
    """Whether the loss is a sum divided by `num_items_in_batch`; else it is a mean, and ignores that number."""

    def labels(self, batch: Mapping[str, object]) -> torch.Tensor | None:
        """Find the labels that are counted; None: the batch has none."""
        found = (batch[name] for name in self.label_names if name in batch)
        return next((labels for labels in found if isinstance(labels, torch.Tensor)), None)

    def weight(self, batch: Batch) -> torch.Tensor:
        """Count the targets; without labels, the rows."""
        labels = batch.get(_SHIFTED)
        if labels is None:
            labels = self.labels(batch)
            if labels is None:
                return batch[NUM_ROWS] if NUM_ROWS in batch else torch.tensor(find_batch_size(batch) or 1)
            if (self.shifts or self.moves) and labels.ndim > 1:
                labels = labels[:, 1:]
        return is_target(labels).count_nonzero()

    def prepared(self, batch: Mapping[str, object], weight: torch.Tensor) -> dict[str, object]:
        """Give a batch whose loss, a mean over targets, can be computed.

        A batch without targets gets arbitrary ones: their mean is finite, and is multiplied by 0.
        """
        changed = {}
        for name in (*self.label_names, _SHIFTED):
            labels = batch.get(name)
            if isinstance(labels, torch.Tensor):
                if self.moves and labels.ndim > 1 and name != _SHIFTED:
                    labels = torch.cat([labels[:, 1:], ignored_like(labels[:, :1])], 1)
                changed[name] = labels.masked_fill(weight == 0, 0)
        return {name: value for name, value in {**batch, **changed}.items() if name != NUM_ROWS}
