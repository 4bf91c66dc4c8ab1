"""Objectives whose items are the tokens that a batch, once it is prepared, has as labels."""

from __future__ import annotations

from dataclasses import replace

import torch

from hfdist.config.batch import IGNORED
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.step.objective import Objective


class TokenLoss(Objective):
    """What these objectives share: how items and tokens are counted."""

    @property
    def convention(self) -> Convention:
        """As of all objectives; the items are tokens, so that their loss has a perplexity."""
        return replace(super().convention, is_of_tokens=True)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the labels."""
        return (batch["labels"] != IGNORED).sum()

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens that an encoder reads, without what fills up: layouts fill up otherwise."""
        return int(batch["attention_mask"].sum())
