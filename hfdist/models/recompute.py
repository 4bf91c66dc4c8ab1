"""`train.recompute`: what gradient checkpointing keeps of a block besides its input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
    watch = _Watch()
    watch.beneath, repetition = create_selective_checkpoint_contexts(_policy(watch))
    return watch, repetition


class _Watch(TorchDispatchMode):
    """Of one block's forward: refuses what writes to a kept output, from which its repetition would go on.

    torch tells that from versions of tensors, which views beneath autograd do not share.

    Raises:
        ConfigError: an operator writes to a kept output.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.beneath: Any = None
        self.keeps_output = False
        self._kept: set[StorageWeakRef] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own modes for checkpoints."""
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        """torch.compile puts the number of its graph on a block's context, from torch 2.13."""
        object.__setattr__(self.beneath if name == "ac_graph_id" else self, name, value)

    def __enter__(self) -> Any:
        self.beneath.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.beneath.__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Private, but there is no other way to ask it; higher-order operators have none.
        schema = getattr(operation, "_schema", None)
        if schema is not None and schema.is_mutable:
            named = [*zip(schema.arguments, args, strict=False)]
            named += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
            written = [value for argument, value in named if argument.is_write]
            if not self._kept.isdisjoint(_storages(written)):
                raise ConfigError(
                    "a block of this model writes to what would be kept, so its gradients would be wrong",
                    where="train.recompute",
                    found=f"cheap, with {operation}",
                    allowed="all",
                    hint="train.recompute=all",
                )
        self.keeps_output = False
        output = operation(*args, **kwargs)
        if self.keeps_output:
            self._kept |= _storages(output)
        return output


def _storages(values: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _policy(watch: _Watch) -> Callable[..., CheckpointPolicy]:
    products: Counter[bool] = Counter()
    kept = {getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)}
    counted = {getattr(torch.ops.aten, name).default for name in _PRODUCTS}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation in kept
        if operation in counted:
            # Counted apart in the forward and in its repetition, so that both decide alike.
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        watch.keeps_output = is_kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
