"""The base of objectives whose items are tokens: the labels of a prepared batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from hfdist.config.batch import IGNORED
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.step.objective import Objective


class TokenLoss(Objective):
    """Counts items and tokens of objectives in which each label is an item."""

    @property
    def convention(self) -> Convention:
        """How the Trainer divides and reports the loss: as for other objectives, and with a perplexity of tokens."""
        return replace(super().convention, is_of_tokens=True)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the labels of a prepared batch."""
        return (batch["labels"] != IGNORED).sum()

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens that an encoder reads in a prepared batch.

        What fills up rows does not count: each layout fills them up to another length.
        """
        return int(batch["attention_mask"].sum())
