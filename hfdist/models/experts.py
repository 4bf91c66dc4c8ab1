"""Reads a mixture of experts off configs and names: numbers of experts, and which parameters belong to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from transformers import PreTrainedConfig

_ALL = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configs that count the experts of a block."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "top_k")
"""Fields of configs that count the experts of a token."""


def is_of_experts(name: str) -> bool:
    """Whether a parameter belongs to routed experts, by its name in transformers' classes."""
    return ".experts." in name


def mixture_of(name: str) -> str:
    """Give the name of a mixture by the name of its experts, or of a parameter in them: the part before `.experts`."""
    return name.partition(".experts")[0]


def num_experts(config: PreTrainedConfig) -> int:
    """Give how many experts a router of this text model chooses from; 0: its config does not say."""
    return first_number(config, _ALL) or first_number(_of_ffn(config), _ALL)


def num_chosen_experts(config: PreTrainedConfig) -> int:
    """Give how many experts a router of this text model chooses for a token; 0: its config does not say."""
    return first_number(config, _CHOSEN) or first_number(_of_ffn(config), _CHOSEN)


def _of_ffn(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give the config that counts the experts: dbrx's of its feed-forward layers; of other types the config itself."""
    ffn_config: object = getattr(config, "ffn_config", None)
    return ffn_config if isinstance(ffn_config, PreTrainedConfig) else config


def num_active(
    parameters: Iterable[tuple[str, torch.Tensor]],
    config: PreTrainedConfig,
    numel: Callable[[torch.Tensor], int] = torch.numel,
) -> float:
    """Count the elements of parameters that one token meets: of routed experts, the share that a router chooses.

    Args:
        parameters: names and parameters of a model.
        config: config of the text model.
        numel: gives the number of elements of a whole parameter.

    Returns:
        The number of elements; it may be no whole number, as a share of experts counts.
    """
    all_experts, chosen = num_experts(config), num_chosen_experts(config)
    # Some of LongCat's have no weights: a token that chooses them meets fewer.
    share = chosen / (all_experts + first_number(config, ("zero_expert_num",))) if all_experts and chosen else 1.0
    return sum(
        numel(parameter) * (share if is_of_experts(name) or _are_stacked(parameter, all_experts) else 1)
        for name, parameter in parameters
    )


def _are_stacked(parameter: torch.Tensor, number: int) -> bool:
    """Whether a parameter is a matrix of each of so many experts, as those of JetMoe, whose names do not say it."""
    # ZeRO-3 keeps the shape of the whole here. A convolution over each channel by itself has 1 in the middle.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return len(shape) == 3 and shape[0] == number and shape[1] > 1


def first_number(config: PreTrainedConfig, names: Iterable[str]) -> int:
    """Give the first of these fields that is a whole number; 0: none is."""
    for name in names:
        # transformers raises RuntimeError for a field that differs by block.
        with suppress(RuntimeError):
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0
