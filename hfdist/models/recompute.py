"""Blocks whose activations are computed again in the backward: all of them, or what is cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from hfdist.config.train import Recompute
from hfdist.errors import ConfigError

_PRODUCTS = ("mm", "addmm")
"""Matrix products, of which every second one is kept."""
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Kernels of attention whose output is kept."""


def checkpoint_blocks(model: PreTrainedModel, recompute: Recompute, *, offloads: bool = False) -> None:
    """Checkpoint each block: compute its activations again in the backward.

    Args:
        model: changed in place.
        recompute: `cheap` keeps the outputs of attention and of every second matrix product.
        offloads: whether the inputs of blocks, which are kept for the backward, wait for it in host memory.

    Raises:
        ConfigError: the model's blocks cannot be checkpointed.
    """
    options = {"use_reentrant": False} | ({"context_fn": _contexts} if recompute is Recompute.cheap else {})
    try:
        model.activation_checkpointing_enable(options)
    except ValueError as error:
        raise ConfigError(
            str(error), where="train.gradient_checkpointing", hint="train.gradient_checkpointing=false"
        ) from error

    for module in model.modules() if offloads else ():
        # A private name, under which transformers keeps the function that checkpoints a block.
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None:
            vars(module)["_gradient_checkpointing_func"] = partial(_offloading, checkpoint)


def _offloading(
    checkpoint: Callable[..., object], function: Callable[..., object], *inputs: object, **named: object
) -> object:
    # The checkpoint saves only the inputs of the block, so only these meet the hooks.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *inputs, **named)


def _contexts() -> object:
    # The choice holds for one block's forward, and for its repetition.
    choice = _Choice()
    beneath, repetition = create_selective_checkpoint_contexts(_policy(choice))
    watch = _Watch(beneath, choice)
    return watch, repetition


@dataclass
class _Choice:
    """What the policy says of the last operation.

    Apart from `_Watch`: a policy that knew its watch would be a circle, and kept outputs would wait for the garbage
    collector.
    """

    keeps_output: bool = False


class _Watch(TorchDispatchMode):
    """During one block's forward: refuses what writes to a kept output, from which its repetition would go on.

    torch tells that from versions of tensors, which views beneath autograd do not share.
    """

    supports_higher_order_operators = True

    beneath: Any  # torch's own mode, whose class is private

    def __init__(self, beneath: object, choice: _Choice) -> None:
        super().__init__()
        self.beneath, self._choice = beneath, choice
        self._kept: set[StorageWeakRef] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile ignore the mode, as it does torch's own modes for checkpoints."""
        return True

    def __setattr__(self, name: str, value: object) -> None:
        """torch.compile puts the number of its graph on a block's context, from torch 2.13."""
        object.__setattr__(self.beneath if name == "ac_graph_id" else self, name, value)

    def __enter__(self) -> object:
        self.beneath.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.beneath.__exit__(*error)

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # A private field: nothing public says what an operation writes. Higher-order operators have none.
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
        self._choice.keeps_output = False
        output = operation(*args, **kwargs)
        if self._choice.keeps_output:
            self._kept |= _storages(output)
        return output


def _storages(values: object) -> set[StorageWeakRef]:
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _policy(choice: _Choice) -> Callable[..., CheckpointPolicy]:
    products: Counter[bool] = Counter()
    kept = {getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)}
    # The kernel for packed documents is registered once its module was imported.
    of_documents = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    kept |= set() if of_documents is None else {of_documents.default}
    counted = {getattr(torch.ops.aten, name).default for name in _PRODUCTS}

    def policy(
        context: SelectiveCheckpointContext, operation: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        is_kept = operation in kept
        if operation in counted:
            # Counted apart in the forward and in its repetition, so that both decide alike.
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        choice.keeps_output = is_kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
