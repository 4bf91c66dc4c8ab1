"""Activation checkpointing of blocks: a block computes its activations again in the backward, all or the cheap ones.

recompute    kept of a block from its forward                          computed again in the backward
all          its inputs                                                everything
cheap        its inputs, outputs of attention, every second product    all other operations
"""

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
"""Matrix products: the output of every second one is kept."""
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Kernels of attention: their outputs are kept."""


def checkpoint_blocks(model: PreTrainedModel, recompute: Recompute, *, offloads: bool = False) -> None:
    """Checkpoint each block: compute its activations again in the backward.

    Args:
        model: changed in place.
        recompute: `cheap` keeps the outputs of attention and of every second matrix product.
        offloads: whether the inputs of blocks, which are kept for the backward, wait for it in host memory.

    Raises:
        ConfigError: the model's blocks cannot be checkpointed.
    """
    options: dict[str, object] = {"use_reentrant": False}
    if recompute is Recompute.cheap:
        options["context_fn"] = _contexts
    try:
        model.activation_checkpointing_enable(options)
    except ValueError as error:
        raise ConfigError(
            str(error), where="train.gradient_checkpointing", hint="train.gradient_checkpointing=false"
        ) from error

    if not offloads:
        return
    for module in model.modules():
        # A private name, under which transformers keeps the function that checkpoints a block.
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None:
            vars(module)["_gradient_checkpointing_func"] = partial(_offloading, checkpoint)


def _offloading(
    checkpoint: Callable[..., object], function: Callable[..., object], *inputs: object, **named: object
) -> object:
    """Run a block's checkpoint so that the inputs that it saves wait for the backward in host memory."""
    # The checkpoint saves only the inputs of the block, so only these meet the hooks.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *inputs, **named)


def _contexts() -> tuple[object, object]:
    """Make the contexts of one block's forward and of its repetition in the backward, as torch asks for them."""
    choice = _Choice()
    forward, repetition = create_selective_checkpoint_contexts(_policy(choice))
    return _Watch(forward, choice), repetition


@dataclass
class _Choice:
    """What the policy has decided about the last operation.

    It is an object of its own since a policy that knew its `_Watch` would be a circle of references: kept outputs would
    wait for the garbage collector.
    """

    keeps_output: bool = False


class _Watch(TorchDispatchMode):
    """A mode of one block's forward that refuses an operation which writes to a kept output.

    The repetition would go on from the changed output, and gradients would be wrong. torch itself looks at versions of
    tensors for this, but views beneath autograd do not share these.
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
        """Hand torch.compile's number of a graph on to torch's own mode, where torch 2.13 and later look for it."""
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
        written = _written_values(operation, args, kwargs)
        if written and not self._kept.isdisjoint(_storages(written)):
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


def _written_values(
    operation: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> list[object]:
    """List the arguments to which an operation writes."""
    # A private field: nothing public says what an operation writes. Higher-order operators have none.
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = list(zip(schema.arguments, args, strict=False))
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    return [value for argument, value in given if argument.is_write]


def _storages(values: object) -> set[StorageWeakRef]:
    """Give the memory of all tensors in nested values, by references that do not keep it."""
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _policy(choice: _Choice) -> Callable[..., CheckpointPolicy]:
    """Make the policy of one block: a function that decides for each operation, and notes its decision in `choice`."""
    # Products so far, by whether they are of the repetition.
    products: Counter[bool] = Counter()
    kept = {getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)}
    # The kernel for packed documents is registered once its module was imported.
    of_documents = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    if of_documents is not None:
        kept.add(of_documents.default)
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
