"""Sequence to sequence: an encoder reads the source of a row, and a decoder learns to write its target.

A row is one array, its source before its target. Sources and targets are padded by themselves: rows of like lengths
stand together (data/packing), and no row sees another one.
"""

from __future__ import annotations

import torch
from torch import nn

from hfdist.config.batch import IGNORED
from hfdist.models.target_loss import pad_pairs, sum_target_losses
from hfdist.strategies.engine import Batch
from hfdist.tune.token_loss import TokenLoss


class SequenceToSequence(TokenLoss):
    """The objective of pairs of source and target; its items are the tokens of targets."""

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens of sources and of targets."""
        return super().num_tokens(batch) + int(self.count(batch))

    def target_length(self, batch: Batch) -> int:
        """Give the tokens of the longest target."""
        return batch["labels"].shape[-1]

    def prepare(self, batch: Batch) -> Batch:
        """Part sources from targets."""
        return pad_pairs([split_pair(*row) for row in zip(batch["input_ids"], batch["labels"], strict=True)])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the tokens of targets."""
        return sum_target_losses(model, batch)


def split_pair(ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Give the source and the target of a row; `ids` and `labels` have the shape [tokens], filled up at their end.

    A row without a target, as of a lane that has ended, gives its first token as a source.
    """
    is_target = labels != IGNORED
    first = int(is_target.int().argmax()) if is_target.any() else 1
    return [ids[:first], ids[is_target]]
