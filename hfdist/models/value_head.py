"""A head of values beside the head of tokens: it predicts, at each token, the reward that is still to come.

    hidden states [rows, tokens, width]  ->  output embedding  ->  logits [rows, tokens, vocabulary]
                                         ->  value_head        ->  values [rows, tokens]

It is a layer of the model, so each layout shards, clips and saves it like any other one. The policy's own files do not
have it: a checkpoint keeps it beside the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.models.initialize import initialize_by_name
from hfdist.models.partitioning import Partitioning, whole_shape

_NAME = "value_head"
_WEIGHT = f"{_NAME}.weight"


def is_of_value_head(name: str) -> bool:
    """Whether a parameter of this name belongs to a head of values."""
    return name == _WEIGHT


def check_value_head(model: PreTrainedModel) -> None:
    """Check that a model names the layer that predicts its tokens: a head of values reads the same states.

    Raises:
        ConfigError: it names none.
    """
    # Any: transformers says of an embedding that it is a module or a tensor.
    head: Any = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), torch.Tensor):
        what = (
            "the model does not say which layer predicts its tokens, and values are of the states that this one reads"
        )
        hint = "another decoder, such as llama or qwen3; task=grpo needs no values"
        raise ConfigError(what, where="model.name, model.type", found=type(model).__name__, hint=hint)


def add_value_head(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Add a head of values of type `dtype` to a model with all its layers, in place.

    Its weight gets its random values later, from `draw_value_head`.
    """
    head: Any = model.get_output_embeddings()
    model.add_module(_NAME, nn.Linear(whole_shape(head.weight)[1], 1, bias=False, dtype=dtype))


def draw_value_head(model: PreTrainedModel, seed: int, layout: Partitioning) -> None:
    """Give the weight of the head of values its random values, which `seed` determines in any layout."""
    initialize_by_name(model, seed, layout, only={_WEIGHT})


@contextmanager
def noting_values(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Note the values that the next forward gives, in this context.

    Args:
        model: the model in the wrapper of its layout, or one stage of it.

    Yields:
        A list, to which the forward adds the values, float32 of shape [rows, tokens]. It stays empty where a stage ends
        before the head.
    """
    base: Any = model
    while not isinstance(base, PreTrainedModel):
        base = base.module
    found: list[torch.Tensor] = []

    def note(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # A loss that is computed in chunks calls the head of tokens again.
        if not found:
            value_head = cast(nn.Linear, base.get_submodule(_NAME))
            found.append(value_head(inputs[0].to(value_head.weight.dtype)).squeeze(-1).float())

    # It runs in the forward, where sharded weights are whole, and before tensor ranks change what the head reads.
    handle = base.get_output_embeddings().register_forward_pre_hook(note, prepend=True)
    try:
        yield found
    finally:
        handle.remove()
