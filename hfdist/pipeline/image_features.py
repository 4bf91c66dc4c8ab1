"""Features of images in a pipeline: the first stage computes them, and later ones get those that their blocks read.

model.get_image_features(pixel_values, ...)      first stage: the model's own; what later blocks read is kept, to travel
                                                 later stage: what has travelled, and NaN in place of the rest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers.utils.generic import ModelOutput

from hfdist.errors import PartitionError

Features = dict[str, Any]
"""What `get_image_features` gives, by the names of its fields: tensors, and lists of them."""
_METHOD = "get_image_features"


def keep_features(model: nn.Module, keep: Callable[[Features], object]) -> None:
    """Change a model in place so that it hands the features of each forward's images to `keep`.

    Raises in such a forward:
        PartitionError: the model gives features without names.
    """
    _replace_methods(model, lambda own, *args, **kwargs: _handed_over(own(*args, **kwargs), keep))


def give_features(model: nn.Module, give: Callable[[], Features]) -> None:
    """Change a model in place so that it takes features from `give` and does not compute them."""
    _replace_methods(model, lambda own, *args, **kwargs: _as_output(give()))


def _replace_methods(model: nn.Module, replacement: Callable[..., object]) -> None:
    # A model with a head has the method of the one without, too.
    for module in [module for module in model.modules() if hasattr(module, _METHOD)]:
        setattr(module, _METHOD, partial(replacement, getattr(module, _METHOD)))


def _handed_over(output: object, keep: Callable[[Features], object]) -> object:
    if not isinstance(output, Mapping):
        raise PartitionError("the model gives features of images without names", found=type(output).__name__)
    keep(dict(output))
    return output


def _as_output(features: Features) -> ModelOutput:
    output = ModelOutput()
    for name, value in features.items():
        output[name] = value
    return output
