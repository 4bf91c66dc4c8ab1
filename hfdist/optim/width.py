"""`optimizer.base_width`: a learning rate that was found for a model of one width is scaled to that of another width.

With Adam's steps the best rate of hidden matrices falls as 1 / width; that of all other parameters stays (muP).
"""

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
    """Refuse an optimizer to which this rule does not apply, such as SGD or Muon, whose rates need another one.

    Raises:
        ConfigError: a step of the optimizer depends on the size of gradients, or on whole parameters.
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
    """Give the factor for the rate of hidden matrices: `base_width` / hidden_size.

    Args:
        config: config of the model that is trained.
        base_width: hidden_size of the model for which the rate was found.

    Raises:
        ConfigError: the model's config has no hidden_size.
    """
    width = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(width, int):
        what, found = "the width of this model is not known", f"{config.model_type}, without hidden_size"
        raise ConfigError(what, where=_KEY, found=found, hint=f"{_KEY}=null")
    return base_width / width


def hidden_matrices(model: PreTrainedModel, whole_shape: Callable[[torch.Tensor], tuple[int, ...]]) -> set[int]:
    """Give the ids of all parameters of two dimensions or more, without biases, embeddings and heads, tied or not.

    Args:
        model: the whole model, or a rank's part of it.
        whole_shape: gives the shape that a parameter has in the whole model.
    """
    apart = embeddings_and_heads(model)
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if len(whole_shape(parameter)) >= 2 and id(parameter) not in apart and not is_bias(name)
    }


def scale_rates(optimizer: torch.optim.Optimizer, parameters: Set[int], factor: float) -> None:
    """Move parameters to groups of their own, with another learning rate.

    These come after all other groups, as a Trainer logs the rate of the first group.

    Args:
        optimizer: the optimizer, whose groups are changed.
        parameters: ids of the parameters.
        factor: the factor by which their learning rate is multiplied.
    """
    scaled = []
    for group in optimizer.param_groups:
        chosen = [parameter for parameter in group["params"] if id(parameter) in parameters]
        if chosen:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in parameters]
            scaled.append(group | {"params": chosen, "lr": group["lr"] * factor})
    optimizer.param_groups.extend(scaled)
