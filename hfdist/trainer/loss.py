"""The causal language-model loss, weighted by target tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfdist.data.packing.sequence import IGNORED


def num_input_tokens(batch: Any) -> int:
    """Count the tokens that a model reads; 0 for batches of another form, such as those of rewards."""
    # A dict is a Mapping, but told much faster.
    return batch["input_ids"].numel() if isinstance(batch, (dict, Mapping)) and "input_ids" in batch else 0


def num_target_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Count targets: position t + 1 is the target of position t, so the first label never counts."""
    return (labels[..., 1:] != IGNORED).sum()


def causal_lm_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Sum of the token losses over the number of targets in the *global* batch.

    Args:
        outputs: of a causal language model; `logits` of shape [sequences, tokens, vocabulary].
        labels: shape [sequences, tokens], not shifted.
        num_items_in_batch: targets of the global batch; None: of this batch.
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (num_target_tokens(labels) if num_items_in_batch is None else num_items_in_batch)


def sum_of_token_losses(
    model: nn.Module, batch: dict[str, torch.Tensor], *, accepts_loss_kwargs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the sum of the token losses (float64) and the number of targets of a batch."""
    count = num_target_tokens(batch["labels"])
    if accepts_loss_kwargs:
        # Divided by one item, the model's own loss is a sum.
        outputs = model(**batch, num_items_in_batch=torch.ones((), device=count.device))
        total = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    else:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        total = causal_lm_loss(model(**inputs), batch["labels"], 1)
    return total.double(), count
