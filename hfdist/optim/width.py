"""`optimizer.base_width`: a learning rate that was found at one width, in a model of another width."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.optim.check import describe
from hfdist.optim.muon import embeddings_and_heads, is_bias
from hfdist.optim.probe import Reach, ignores_gradient_size, probe_optimizer

_KEY = "optimizer.base_width"


def check_optimizer_of_width(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer to which the rule does not apply: with SGD or Muon, rates depend on the width otherwise.

    Raises:
        ConfigError: its step depends on the size of gradients, or on whole parameters.
    """
    answer = probe_optimizer(optimizer)
    why = answer.why
    if answer.reach is Reach.element and not ignores_gradient_size(optimizer):
        why = "its step grows with the gradients"
    if why:
        what = "the rate of hidden matrices is known to fall as 1 / width for steps like Adam's only"
        allowed = "an optimizer that divides each element's step by the size of its own gradients, such as adamw"
        raise ConfigError(what, where=_KEY, found=f"{describe(optimizer)}: {why}", allowed=allowed, hint=f"{_KEY}=null")


def rate_factor(config: PreTrainedConfig, base_width: int) -> float:
    """Give what the rate of hidden matrices is multiplied by: `base_width` / hidden_size.

    Raises:
        ConfigError: the model's config has no hidden_size.
    """
    width = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(width, int):
        what, found = "the width of this model is not known", f"{config.model_type}, without hidden_size"
        raise ConfigError(what, where=_KEY, found=found, hint=f"{_KEY}=null")
    return base_width / width


def hidden_matrices(model: PreTrainedModel, whole_shape: Callable[[torch.Tensor], tuple[int, ...]]) -> set[int]:
    """Give the ids of parameters of two dimensions or more, but for embeddings and heads, tied or not, and biases.

    Args:
        model: whole, or a rank's part of it.
        whole_shape: of a parameter in the whole model.
    """
    apart = embeddings_and_heads(model)
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if len(whole_shape(parameter)) >= 2 and id(parameter) not in apart and not is_bias(name)
    }


def scale_rates(optimizer: torch.optim.Optimizer, parameters: Set[int], factor: float) -> None:
    """Move these parameters to groups of their own with `factor` times the rate.

    They come after the other groups, as the rate of the first is logged.
    """
    scaled = []
    for group in optimizer.param_groups:
        chosen = [parameter for parameter in group["params"] if id(parameter) in parameters]
        if chosen:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in parameters]
            scaled.append(group | {"params": chosen, "lr": group["lr"] * factor})
    optimizer.param_groups.extend(scaled)
