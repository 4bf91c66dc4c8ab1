"""Models and tokenizers of transformers: from the Hub, a folder, or random weights."""

from hfdist.models.architecture import load_architecture
from hfdist.models.build import build_model
from hfdist.models.tokenizer import load_tokenizer

__all__ = ["build_model", "load_architecture", "load_tokenizer"]
