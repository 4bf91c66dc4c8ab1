"""The two ends of a model: the module that looks tokens up, and whether there is a head at all."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

_WITHOUT_HEAD = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ([names] if isinstance(names, str) else names)
)


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Give the module that looks tokens up; None: a class of somebody's own does not say which it is."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def has_no_head(model: PreTrainedModel) -> bool:
    """Whether the model gives hidden states, and takes no labels."""
    return type(model).__name__ in _WITHOUT_HEAD
