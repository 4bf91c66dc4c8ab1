"""Finds the transformer blocks of any language model without a list of architectures, and compiles them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Compile, TrainConfig
from hfdist.errors import ConfigError, first_line
from hfdist.models.image_text import may_read_images
from hfdist.models.probing import run_small, small_model

logger = logging.getLogger(__name__)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Find the model's list of blocks.

    Returns:
        Among the lists as long as the model is deep, the one with most modules inside; if no list is so long, that of
        all lists.

    Raises:
        ConfigError: the model has no list of modules.
    """
    text = model.config.get_text_config()
    depths = {getattr(text, name, None) for name in ("num_hidden_layers", "num_layers", "n_layer")}
    # A tower that reads images may have as many blocks, so only the part that writes text is searched.
    writer = model.get_decoder() if may_read_images(model.config) else model
    lists = [module for module in writer.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ConfigError(
            "the model's transformer blocks cannot be found",
            where="model.name",
            found=type(model).__name__,
            allowed="a model that keeps its blocks in a torch.nn.ModuleList",
            hint="train.compile=none or model, and a strategy without a pipeline",
        )
    candidates = [blocks for blocks in lists if len(blocks) in depths] or lists
    # Parameters are not counted: under ZeRO-3 this rank may hold none.
    return max(candidates, key=lambda blocks: sum(1 for _ in blocks.modules()))


def find_block_parts(model: PreTrainedModel) -> list[tuple[nn.Module, ...]]:
    """Give the modules of each block, in order.

    A block is one module, or in models that keep several lists of equal length side by side, one module of each list.

    Raises:
        ConfigError: the model has no list of modules.
    """
    blocks = find_blocks(model)
    parent = next(module for module in model.modules() if blocks in module.children())
    lists = [child for child in parent.children() if isinstance(child, nn.ModuleList) and len(child) == len(blocks)]
    return list(zip(*lists, strict=True))


@unset_fake_temporarily()
def calls_blocks(model: PreTrainedModel) -> bool:
    """Whether a step calls each block, and calls the modules inside of blocks only from their block.

    Models with reversible layers call the modules inside by themselves. A small model of the same class is tried; True
    also where none can be made.
    """
    called: set[nn.Module] = set()
    running: list[nn.Module] = []
    called_outside: list[nn.Module] = []

    def note_begin(block: nn.Module, _: object) -> None:
        called.add(block)
        running.append(block)

    def note_end(*_: object) -> None:
        running.pop()

    def note_inner(inner: nn.Module, _: object) -> None:
        if not running:
            called_outside.append(inner)

    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            parts = [part for block in find_block_parts(small) for part in block]
            for part in parts:
                part.register_forward_pre_hook(note_begin)
                part.register_forward_hook(note_end)
                _, *inner_modules = part.modules()
                for inner in inner_modules:
                    inner.register_forward_pre_hook(note_inner)
            # Reversible layers refuse to run outside of training.
            run_small(small.train())
        except Exception:  # whatever a model raises that cannot be made small, or has another kind of loss
            return True
    return not called_outside and len(called) == len(parts)


def compiles_blocks(config: RunConfig, model: PreTrainedModel) -> bool:
    """Whether a run compiles its blocks, as `train.compile` asks; `auto` does so where it is known to work."""
    if config.train.compile is not Compile.auto or not compiles_on_gpus(config.train, config.strategy):
        return config.train.compile is Compile.blocks
    # Without triton, torch compiles nothing for a GPU.
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return can_compile_blocks(model, torch.device("cuda"))


def compiles_on_gpus(train: TrainConfig, strategy: StrategyConfig) -> bool:
    """Whether blocks are compiled where there are GPUs and a compiler that works, by the config alone."""
    if train.compile is not Compile.auto:
        return train.compile is Compile.blocks
    # A compiled block computes both gradients at once, which zero-bubble schedules run apart; and ZeRO-3's gathering
    # breaks its graph, as DTensors of tensor ranks and the sizes that expert ranks tell each other may.
    return not strategy.mesh.divides_parameters and not strategy.partitions_in_constructor


def can_compile_blocks(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether blocks are found and the compiler works on this device; logs a warning with the reason if not."""
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
    """Call a compiled function once, to find out whether it works here.

    Returns:
        The first line of the error; None: the function works.
    """
    try:
        function(*arguments)
    except Exception as error:  # whatever the compiler, a C compiler or the driver raises
        return first_line(error)
    return None
