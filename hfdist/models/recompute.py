"""`train.recompute`: what gradient checkpointing keeps of a block besides its input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from hfdist.errors import ConfigError

_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def keep_expensive(model: PreTrainedModel) -> None:
    """Checkpoint each block, but keep the outputs of its attention and of every second matrix product.

    Raises:
        ConfigError: the model's blocks cannot be checkpointed.
    """
    try:
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": _contexts})
    except ValueError as error:
        raise ConfigError(
            str(error), where="train.gradient_checkpointing", hint="train.gradient_checkpointing=false"
        ) from error


def _contexts() -> Any:
    """Of one block's forward, and of its repetition."""
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., CheckpointPolicy]:
    products: Counter[bool] = Counter()
    kept = {getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)}
    counted = {getattr(torch.ops.aten, name).default for name in _PRODUCTS}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation in kept
        if operation in counted:
            # Counted apart in the forward and in its repetition, so that both decide alike.
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
