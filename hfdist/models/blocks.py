"""The transformer blocks of any causal language model: found without a list of architectures, compiled, recomputed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
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

from hfdist.config.run import RunConfig
from hfdist.config.train import Compile, Recompute, TrainConfig
from hfdist.errors import ConfigError, first_line
from hfdist.models.partitioning import Partitioning
from hfdist.models.probing import run_small, small_model
from hfdist.topology import Mesh

logger = logging.getLogger(__name__)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Give the list of blocks: of the lists as long as the model is deep, or else of all, the one with most modules.

    Raises:
        ConfigError: there is no list of modules.
    """
    text = model.config.get_text_config()
    depths = {getattr(text, name, None) for name in ("num_hidden_layers", "num_layers", "n_layer")}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ConfigError(
            "the model's transformer blocks cannot be found",
            where="model.name",
            found=type(model).__name__,
            allowed="a model that keeps its blocks in a torch.nn.ModuleList",
            hint="train.compile=none or model, and a strategy without a pipeline",
        )
    candidates = [blocks for blocks in lists if len(blocks) in depths] or lists
    # Not with most parameters: under ZeRO-3 this rank holds none of them.
    return max(candidates, key=lambda blocks: sum(1 for _ in blocks.modules()))


def find_block_parts(model: PreTrainedModel) -> list[tuple[nn.Module, ...]]:
    """Give the modules of each block: one, or in models that keep several lists side by side, one of each list.

    Raises:
        ConfigError: there is no list of blocks.
    """
    blocks = find_blocks(model)
    parent = next(module for module in model.modules() if blocks in module.children())
    beside = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == len(blocks)]
    return list(zip(*beside, strict=True))


@unset_fake_temporarily()
def calls_blocks(model: PreTrainedModel) -> bool:
    """Whether a step calls each block, and modules inside of blocks only from there; reversible layers do not.

    Tried on a small model of the same class; True also where that cannot be made.
    """
    called: set[nn.Module] = set()
    running: list[nn.Module] = []
    is_by_blocks = True

    def begin(block: nn.Module, _: object) -> None:
        called.add(block)
        running.append(block)

    def end(*_: object) -> None:
        running.pop()

    def look(*_: object) -> None:
        nonlocal is_by_blocks
        is_by_blocks = is_by_blocks and bool(running)

    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            parts = [part for parts in find_block_parts(small) for part in parts]
            for part in parts:
                part.register_forward_pre_hook(begin)
                part.register_forward_hook(end)
                for inner in list(part.modules())[1:]:
                    inner.register_forward_pre_hook(look)
            # Reversible layers refuse any other mode.
            run_small(small.train())
        except Exception:  # whatever a model raises that cannot be made small, or has another kind of loss
            return True
    return is_by_blocks and len(called) == len(parts)


def compiles_blocks(config: RunConfig, model: PreTrainedModel, layout: Partitioning) -> bool:
    """Whether a run compiles its blocks: as `train.compile` says."""
    if config.train.compile is not Compile.auto or not compiles_on_gpus(config.train, config.strategy.mesh, layout):
        return config.train.compile is Compile.blocks
    # Without triton, torch compiles nothing for a GPU.
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return can_compile_blocks(model, torch.device("cuda"))


def compiles_on_gpus(train: TrainConfig, mesh: Mesh, layout: Partitioning) -> bool:
    """Whether blocks are compiled where there are GPUs and a compiler that works."""
    if train.compile is not Compile.auto:
        return train.compile is Compile.blocks
    # A compiled block computes both gradients at once, which zero-bubble schedules run apart; and ZeRO-3's gathering
    # breaks its graph, as DTensors of tensor ranks and the sizes that expert ranks tell each other may.
    return not mesh.divides_parameters and not layout.partitions_in_constructor


def can_compile_blocks(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the blocks are found and the compiler works; says so if not."""
    try:
        find_blocks(model)
        function = torch.compile(lambda values: (values.sin() + 1).sum())
        reason = why_not_compiled(lambda: function(torch.zeros(8, device=device)))
    except ConfigError as error:
        reason = error.what
    if reason is not None:
        logger.warning("train.compile: nothing is compiled, since that fails here: %s", reason)
    return reason is None


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block in place: parameter names stay, and equal blocks share one compilation."""
    for block in find_blocks(model):
        block.compile()


def why_not_compiled(function: Callable[..., object], *arguments: object) -> str | None:
    """Call a compiled function once.

    Returns:
        The first line of what went wrong; None: it works.
    """
    try:
        function(*arguments)
    except Exception as error:  # whatever the compiler, a C compiler or the driver raises
        return first_line(error)
    return None


_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def checkpoint_blocks(model: PreTrainedModel, recompute: Recompute, *, offloads: bool = False) -> None:
    """Checkpoint each block; `cheap`: keep the outputs of its attention and of every second matrix product.

    With `offloads` the blocks' inputs, which are kept for the backward, wait for it in host memory.

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
        # By this name transformers finds what checkpoints a block.
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None:
            vars(module)["_gradient_checkpointing_func"] = partial(_offloading, checkpoint)


def _offloading(
    checkpoint: Callable[..., object], function: Callable[..., object], *inputs: object, **named: object
) -> object:
    # What the block itself saves is the checkpoint's business; its inputs are left for this.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *inputs, **named)


def _contexts() -> object:
    # For one block's forward, and for its repetition.
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
        """Say what torch's own modes for checkpoints say."""
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
    # Of packed documents; there once its module was imported.
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
