"""What a model gives at its end, and transformers' class of such models for each type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
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


class HeadClass(NamedTuple):
    """The classes of models that end alike."""

    auto: Any
    """transformers' class that makes and opens them."""
    by_config: Any
    """The class of a model, by the class of its config."""
    by_type: Mapping[str, Any]
    """Its name, by the type's name."""
    kind: str
    """What such a model is called."""
    examples: str = "llama, gpt2, qwen3"
    """Types of such models, for messages."""


_SEQUENCES = (
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
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
