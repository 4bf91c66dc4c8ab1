"""Transformers' classes of models by the head at their end, such as one that predicts tokens or labels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)

from hfdist.config.task import Head
from hfdist.models.image_text import may_read_images


class HeadClass(NamedTuple):
    """Transformers' classes of models with one kind of head."""

    auto: Any
    """The Auto class that makes and opens such models."""
    by_config: Any
    """The class of a model, or several classes, by the class of its config."""
    by_type: Mapping[str, Any]
    """The name of a model's class, or several names, by the model's type."""
    kind: str
    """What such a model is called in messages."""
    examples: str = "llama, gpt2, qwen3"
    """Some types of such models, for messages."""


_SEQUENCES = (
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
"""The classes of two kinds of head: scores and labels of a sequence."""
HEADS: Mapping[Head, HeadClass] = MappingProxyType(
    {
        Head.tokens: HeadClass(
            AutoModelForCausalLM,
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            "causal language model",
        ),
        Head.targets: HeadClass(
            AutoModelForSeq2SeqLM,
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            "encoder-decoder",
            "t5, bart, marian",
        ),
        Head.masked: HeadClass(
            AutoModelForMaskedLM,
            MODEL_FOR_MASKED_LM_MAPPING,
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            "masked language model",
            "bert, roberta, modernbert",
        ),
        Head.score: HeadClass(*_SEQUENCES, "model that scores sequences"),
        Head.labels: HeadClass(*_SEQUENCES, "model that classifies texts"),
        Head.token_labels: HeadClass(
            AutoModelForTokenClassification,
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
            "model that classifies tokens",
        ),
        Head.none: HeadClass(AutoModel, MODEL_MAPPING, MODEL_MAPPING_NAMES, "model"),
    }
)
IMAGE_TEXT = HeadClass(
    AutoModelForImageTextToText,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "model of image and text",
    "llava, qwen2_5_vl, gemma3",
)
"""The classes of models of image and text, which have the head `Head.tokens`, too."""


def head_class(head: Head, architecture: PreTrainedConfig) -> HeadClass:
    """Give the classes of models with this head for a config: those of image and text, where its type reads images."""
    return IMAGE_TEXT if head is Head.tokens and may_read_images(architecture) else HEADS[head]


def has_class(head: Head, architecture: PreTrainedConfig) -> bool:
    """Whether transformers has a model with this head for a config."""
    return architecture.model_type in HEADS[head].by_type or head_class(head, architecture) is IMAGE_TEXT


def is_type(head: Head, kind: object) -> bool:
    """Whether transformers has a model with this head for the type `kind`; one that writes text may read images."""
    return kind in HEADS[head].by_type or (head is Head.tokens and kind in IMAGE_TEXT.by_type)
