"""The module of a model that looks tokens up."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Give the module that looks tokens up; None: a class of somebody's own does not say which it is."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found
