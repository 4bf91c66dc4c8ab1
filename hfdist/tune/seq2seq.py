"""Sequence to sequence: an encoder reads the source of a row, and a decoder learns to write its target.

A row of the data is one array, its source before its target. Here it becomes two, padded to the longest of a batch:

    row     s s s t t              source  s s s .      target  t t
            s s t       becomes            s s . .              t .

Rows of like lengths stand together in a batch (data/packing), and no row sees another one.
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
        """Count the tokens of the sources and of the targets of a prepared batch."""
        return super().num_tokens(batch) + int(self.count(batch))

    def target_length(self, batch: Batch) -> int:
        """Give the tokens of the longest target."""
        return batch["labels"].shape[-1]

    def prepare(self, batch: Batch) -> Batch:
        """Split the rows of a batch into sources, which the encoder reads, and targets."""
        return pad_pairs([split_pair(*row) for row in zip(batch["input_ids"], batch["labels"], strict=True)])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the tokens of a prepared batch's targets."""
        return sum_target_losses(model, batch)


def split_pair(ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Give the source and the target of a row, without what fills it up.

    A row without a target, such as those of a lane of the data that has ended, gives its first token as a source: an
    encoder must read something.

    Args:
        ids: tokens of the row, filled up at its end; shape [tokens].
        labels: labels of the row, IGNORED but for its target; shape [tokens].
    """
    is_target = labels != IGNORED
    first = int(is_target.int().argmax()) if is_target.any() else 1
    return [ids[:first], ids[is_target]]
