"""Models and tokenizers of transformers: from the Hub, a folder, or random weights."""

from hfdist.models.architecture import check_fields, find_architecture
from hfdist.models.build import build_model, check_weights
from hfdist.models.tokenizer import load_tokenizer
from hfdist.models.trainable import TrainableParameters
from hfdist.models.vocabulary import fit_vocabulary

__all__ = [
    "TrainableParameters",
    "build_model",
    "check_fields",
    "check_weights",
    "find_architecture",
    "fit_vocabulary",
    "load_tokenizer",
]
