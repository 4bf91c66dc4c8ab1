"""The two ends of a model: the module that looks tokens up, and the kind of its head, by its class."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

_WITHOUT_HEAD = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ([names] if isinstance(names, str) else names)
)
"""Names of transformers' classes without a head; some types have several."""


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


def scores_sequences(model: PreTrainedModel) -> bool:
    """Whether the model is one for sequence classification: its labels are of sequences, not of tokens."""
    return type(model).__name__ in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()


def classifies_tokens(model: PreTrainedModel) -> bool:
    """Whether the model is one for token classification: its labels are no tokens."""
    return type(model).__name__ in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()


def has_token_loss(model: PreTrainedModel) -> bool:
    """Whether the model's own loss is one of tokens: it has a head, and its labels are tokens."""
    return not (has_no_head(model) or classifies_tokens(model) or scores_sequences(model))


def token_reader(model: PreTrainedModel) -> nn.Module:
    """Give the module whose output has a row for each token: the model, or the base of one that scores sequences."""
    base: nn.Module = model.base_model
    return base if scores_sequences(model) else model
