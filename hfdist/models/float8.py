"""Lets the linear layers of blocks multiply in float8, by torchao: `train.precision=fp8`.

Each token has scales of its own, and the weights' gradients, which sum over tokens, are left to bfloat16. So no number
depends on which sequences share a micro batch, and none on the layout.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.errors import ConfigError, ResourceError
from hfdist.models.blocks import find_block_parts
from hfdist.models.experts import num_experts

logger = logging.getLogger(__name__)

_MULTIPLE = 16
"""Float8 kernels take matrices of which both sizes are multiples of this."""


def use_float8(model: PreTrainedModel) -> None:
    """Let the linear layers of a model's blocks multiply in float8, in place: parameters keep their names and types.

    The head, embeddings, routers, experts that are one tensor, and layers of other sizes are left to autocast. Without
    a GPU float8 is emulated.

    Raises:
        ResourceError: the GPU has no float8 arithmetic.
        ConfigError: no layer of the blocks has sizes that float8 kernels take.
    """
    # torchao is optional, and slow to import.
    from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

    emulates = not torch.cuda.is_available()
    if not emulates:
        _check_device()
    text = model.config.get_text_config()
    # A router is left out: its choice of experts is all or nothing, and coarse numbers would change it.
    routed = num_experts(text)

    def fits(module: nn.Module, _: str) -> bool:
        # Derived classes have a forward of their own, which would be lost.
        if type(module) is not nn.Linear or module.out_features == routed:
            return False
        return module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0

    blocks = [part for block in find_block_parts(model) for part in block]

    def list_layers() -> set[nn.Module]:
        return {module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)}

    before = list_layers()
    recipe = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE_WITH_GW_HP)
    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=fits, config=replace(recipe, emulate=emulates))
    changed = list_layers() - before
    if not changed:
        what = "no linear layer of the model's blocks can multiply in float8"
        found = f"fp8, with {type(model).__name__}"
        allowed = f"a model with torch.nn.Linear in its blocks, of sizes that {_MULTIPLE} divides"
        raise ConfigError(what, where="train.precision", found=found, allowed=allowed, hint="train.precision=bf16")
    logger.info("train.precision: %d of %d linear layers of the blocks multiply in float8", len(changed), len(before))
    if emulates:
        logger.warning("train.precision: there is no GPU, so float8 is emulated: as coarse, but not faster")
        for layer in changed:
            layer.register_forward_pre_hook(_autocast)


def _autocast(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give the inputs of a layer in the type of the CPU's autocast: torchao's layers look at a GPU's autocast only."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(tensor.to(dtype) for tensor in inputs)


def _check_device() -> None:
    """Refuse a GPU without float8 arithmetic."""
    from torchao.utils import is_MI300, is_MI350, is_sm_at_least_89

    if not (is_sm_at_least_89() or is_MI300() or is_MI350()):
        raise ResourceError(
            "this GPU has no float8 arithmetic",
            where="train.precision",
            found=f"fp8, on {torch.cuda.get_device_name()}",
            allowed="compute capability 8.9 or higher (Ada, Hopper, Blackwell), or MI300 and later",
            hint="train.precision=bf16",
        )
