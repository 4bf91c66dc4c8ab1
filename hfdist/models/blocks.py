"""Find the transformer blocks of any causal language model, without a list of architectures."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.run import RunConfig
from hfdist.config.train import Compile
from hfdist.errors import ConfigError
from hfdist.models.compiler import why_nothing_is_compiled
from hfdist.models.flops import num_parameters

logger = logging.getLogger(__name__)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Give the list of blocks: of the lists as long as the model is deep, or else of all, the one with most parameters.

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
    return max([blocks for blocks in lists if len(blocks) in depths] or lists, key=num_parameters)


def find_block_parts(model: PreTrainedModel) -> list[tuple[nn.Module, ...]]:
    """Give the modules of each block: one, or in models that keep several lists side by side, one of each list.

    Raises:
        ConfigError: there is no list of blocks.
    """
    blocks = find_blocks(model)
    parent = next(module for module in model.modules() if blocks in module.children())
    beside = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == len(blocks)]
    return list(zip(*beside, strict=True))


def compiles_blocks(config: RunConfig, model: PreTrainedModel) -> bool:
    """Whether a run compiles its blocks: as `train.compile` says."""
    if config.train.compile is not Compile.auto:
        return config.train.compile is Compile.blocks
    # A compiled block computes both gradients at once, which zero-bubble schedules run apart; and ZeRO-3's gathering
    # breaks its graph. Without triton, torch compiles nothing for a GPU.
    is_simple = config.strategy.pipeline == 1 and not is_deepspeed_zero3_enabled()
    if not is_simple or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return can_compile_blocks(model, torch.device("cuda"))


def can_compile_blocks(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the blocks are found and the compiler works; says so if not."""
    try:
        find_blocks(model)
        reason = why_nothing_is_compiled(device)
    except ConfigError as error:
        reason = error.what
    if reason is not None:
        logger.warning("train.compile: nothing is compiled, since that fails here: %s", reason)
    return reason is None


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block in place: parameter names stay, and equal blocks share one compilation."""
    for block in find_blocks(model):
        block.compile()
