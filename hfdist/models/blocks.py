"""Find the transformer blocks of any causal language model, without a list of architectures."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.models.flops import num_parameters


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Give the list of blocks: of the lists as long as the model is deep, the one with the most parameters.

    Raises:
        ConfigError: there is none.
    """
    text = model.config.get_text_config()
    named = [getattr(text, name, None) for name in ("num_hidden_layers", "num_layers", "n_layer")]
    depths = {depth for depth in named if isinstance(depth, int)}
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) in depths]
    if not lists:
        raise ConfigError(
            "the model's transformer blocks cannot be found",
            where="train.compile",
            found=type(model).__name__,
            allowed=f"a list of {' or '.join(map(str, sorted(depths)))} modules",
            hint="train.compile=model or train.compile=none",
        )
    return max(lists, key=num_parameters)


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block in place: parameter names stay, and equal blocks share one compilation."""
    for block in find_blocks(model):
        block.compile()
